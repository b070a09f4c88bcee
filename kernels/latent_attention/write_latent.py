"""write_latent@1: cache[slot // S, slot % S] = (latent[0, t], k_rope[0, t]), for each token t with
slot = slot_mapping[t] >= 0. Tokens with slot -1 are padding and write nothing. Values are rounded to the cache's dtype,
and saturated to the largest finite value of 8 bits (`precast.kernels.storage`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from precast.kernels.dtypes import FLOAT
from precast.kernels.spec import Draw, OpSpec, Sample
from precast.kernels.storage import STORED, bits, rounded


def write_latent(latent: torch.Tensor, k_rope: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write `latent` [1, T, C] and behind it `k_rope` [1, T, Dr] into `cache` [P, S, C + Dr].

    `slot_mapping` [T] int64: page * S + offset, each slot at most once, or -1. Nothing is read back to the host: a
    padding token repeats what the first other token writes, to the same slot; if all tokens are padding, they write
    to slot 0 what it holds.
    """
    if slot_mapping.shape[0] == 0 or cache.shape[0] == 0:
        return
    kept = slot_mapping >= 0
    tokens = torch.arange(slot_mapping.shape[0], device=slot_mapping.device)
    source = torch.where(kept, tokens, kept.long().argmax())
    slots = slot_mapping[source].clamp(min=0)
    page_size = cache.shape[1]
    held = bits(cache)
    rows = bits(rounded(torch.cat((latent[0, source], k_rope[0, source]), dim=-1), cache.dtype))
    held.index_put_((slots // page_size, slots % page_size), torch.where(kept.any(), rows, held[0, 0]))


def _samples(draw: Draw) -> Iterator[Sample]:
    def sample(slots: list[int], pages: int, page_size: int, latent: int, rope: int, dtype: torch.dtype) -> Sample:
        return {
            "latent": draw.normal(1, len(slots), latent),
            "k_rope": draw.normal(1, len(slots), rope),
            "cache": draw.normal(pages, page_size, latent + rope, dtype=dtype),
            "slot_mapping": draw.of(slots, torch.int64),
        }

    yield sample([9, 0, 4, 14], 5, 3, 8, 4, draw.dtype)
    yield sample([-1, 7, -1, 0, 2, -1], 2, 4, 5, 3, draw.dtype)
    yield sample([-1, 7, -1, 5, 2, -1], 2, 4, 5, 3, draw.dtype)
    yield sample([-1, -1], 2, 4, 5, 3, draw.dtype)
    yield sample([], 2, 4, 5, 3, draw.dtype)
    yield sample([-1], 0, 4, 5, 3, draw.dtype)
    yield sample([3, -1, 0], 1, 4, 16, 2, torch.bfloat16)
    # Above what a float8 can hold, too.
    steep = sample([3, -1, 0, 7], 3, 4, 11, 6, torch.float8_e4m3fn)
    yield steep | {"latent": draw.normal(1, 4, 11, scale=300.0), "k_rope": draw.normal(1, 4, 6, scale=1e-2)}
    # Latent and rope part as slices of the product that gives both.
    fused = draw.normal(1, 3, 12)
    yield sample([1, -1, 2], 2, 2, 8, 4, draw.dtype) | {"latent": fused[..., :8], "k_rope": fused[..., 8:]}


WRITE_LATENT = OpSpec(
    name="precast.write_latent",
    axes={"latent": "1 T C", "k_rope": "1 T R", "cache": "P S L", "slot_mapping": "T"},
    results={},
    dtypes={"latent": FLOAT, "k_rope": FLOAT, "cache": STORED, "slot_mapping": (torch.int64,)},
    reference=write_latent,
    samples=_samples,
)
