"""write_kv@1: k_cache[slot // S, slot % S] = k[0, t] and v_cache likewise, for each token t with
slot = slot_mapping[t] >= 0. Tokens with slot -1 are padding and write nothing. Values are rounded to the cache's dtype,
and saturated to the largest finite value of 8 bits (`precast.kernels.storage`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from precast.kernels.dtypes import FLOAT
from precast.kernels.spec import Draw, OpSpec, Sample
from precast.kernels.storage import STORED, bits, rounded


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write `k` [1, T, K, D] and `v` [1, T, K, Dv] into `k_cache` [P, S, K, D] and `v_cache` [P, S, K, Dv].

    `slot_mapping` [T] int64: page * S + offset, each slot at most once, or -1. `k` and `v` stay as they are. Nothing
    is read back to the host: a padding token repeats what the first other token writes, to the same slot; if all
    tokens are padding, they write to slot 0 what it holds.
    """
    if slot_mapping.shape[0] == 0 or k_cache.shape[0] == 0:
        return
    kept = slot_mapping >= 0
    tokens = torch.arange(slot_mapping.shape[0], device=slot_mapping.device)
    source = torch.where(kept, tokens, kept.long().argmax())
    slots = slot_mapping[source].clamp(min=0)
    page_size = k_cache.shape[1]
    page, offset = slots // page_size, slots % page_size
    for new, pages in ((k, k_cache), (v, v_cache)):
        held = bits(pages)
        rows = bits(rounded(new[0, source], pages.dtype))
        held.index_put_((page, offset), torch.where(kept.any(), rows, held[0, 0]))


def _samples(draw: Draw) -> Iterator[Sample]:
    def sample(slots: list[int], pages: int, page_size: int, size: int, value: int, dtype: torch.dtype) -> Sample:
        return {
            "k": draw.normal(1, len(slots), 2, size),
            "v": draw.normal(1, len(slots), 2, value),
            "k_cache": draw.normal(pages, page_size, 2, size, dtype=dtype),
            "v_cache": draw.normal(pages, page_size, 2, value, dtype=dtype),
            "slot_mapping": draw.of(slots, torch.int64),
        }

    yield sample([9, 0, 4, 14], 5, 3, 8, 8, draw.dtype)
    yield sample([-1, 7, -1, 0, 2, -1], 2, 4, 5, 3, draw.dtype)
    yield sample([-1, 7, -1, 5, 2, -1], 2, 4, 5, 3, draw.dtype)
    yield sample([-1, -1], 2, 4, 5, 3, draw.dtype)
    yield sample([], 2, 4, 5, 3, draw.dtype)
    yield sample([-1], 0, 4, 5, 3, draw.dtype)
    yield sample([3, -1, 0], 1, 4, 16, 16, torch.bfloat16)
    yield sample([3, -1, 0], 1, 4, 16, 16, torch.float8_e4m3fn)
    # All a float8 can hold and more: below its least, between two of its values, above its largest, infinite.
    steep = sample([0, -1, 6, 3, 5], 3, 3, 24, 9, torch.float8_e4m3fn)
    spread = draw.uniform(1, 5, 2, 24, low=-14.0, high=13.0, dtype=torch.float32).exp2()
    signed = draw.to(spread * draw.normal(1, 5, 2, 24, dtype=torch.float32).sign(), draw.dtype)
    signed[0, 0, 0, :2] = draw.of([float("inf"), float("-inf")], draw.dtype)
    yield steep | {"k": signed, "v": signed[..., 5:14]}
    # Keys and values as slices of the fused product.
    fused = draw.normal(1, 3, 6, 8)
    yield sample([1, -1, 2], 2, 2, 8, 8, draw.dtype) | {"k": fused[:, :, 2:4], "v": fused[:, :, 4:]}


WRITE_KV = OpSpec(
    name="precast.write_kv",
    axes={"k": "1 T K D", "v": "1 T K E", "k_cache": "P S K D", "v_cache": "P S K E", "slot_mapping": "T"},
    results={},
    dtypes={"k": FLOAT, "v": FLOAT, "k_cache": STORED, "v_cache": STORED, "slot_mapping": (torch.int64,)},
    reference=write_kv,
    samples=_samples,
)
