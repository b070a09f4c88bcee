"""write_latent@1: cache[slot // S, slot % S] = (latent[0, t], k_rope[0, t]), for each token t with
slot = slot_mapping[t] >= 0. Tokens with slot -1 are padding and write nothing. Values are rounded to the cache's dtype,
and saturated to the largest finite value of 8 bits (`precast.kernels.storage`).
"""

from __future__ import annotations

import torch

from precast.kernels.dtypes import FLOAT
from precast.kernels.spec import OpSpec
from precast.kernels.storage import STORED, places_of, rounded, store


def write_latent(latent: torch.Tensor, k_rope: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write `latent` [1, T, C], then `k_rope` [1, T, Dr], into `cache` [P, S, C + Dr].

    `slot_mapping` [T] int64: page * S + offset, each slot at most once, or -1. Nothing is read back to the host.
    """
    if slot_mapping.shape[0] == 0 or cache.shape[0] == 0:
        return
    places = places_of(slot_mapping, cache.shape[1])
    source = places.source
    store(rounded(torch.cat((latent[0, source], k_rope[0, source]), dim=-1), cache.dtype), cache, places)


WRITE_LATENT = OpSpec(
    name="precast.write_latent",
    axes={"latent": "1 T C", "k_rope": "1 T R", "cache": "P S L", "slot_mapping": "T"},
    results={},
    dtypes={"latent": FLOAT, "k_rope": FLOAT, "cache": STORED, "slot_mapping": (torch.int64,)},
    reference=write_latent,
)
