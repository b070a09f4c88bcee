"""write_index_keys@1: cache[slot // S, slot % S] = k[0, t], for each token t with slot = slot_mapping[t] >= 0. Tokens
with slot -1 are padding and write nothing. Values are rounded to the cache's dtype, and saturated to the largest finite
value of 8 bits (`precast.kernels.storage`).
"""

from __future__ import annotations

import torch

from precast.kernels.dtypes import FLOAT
from precast.kernels.spec import OpSpec
from precast.kernels.storage import STORED, places_of, rounded, store


def write_index_keys(k: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write `k` [1, T, D], by which keys are selected, into `cache` [P, S, D].

    `slot_mapping` [T] int64: page * S + offset, each slot at most once, or -1. Nothing is read back to the host.
    """
    if slot_mapping.shape[0] == 0 or cache.shape[0] == 0:
        return
    places = places_of(slot_mapping, cache.shape[1])
    store(rounded(k[0, places.source], cache.dtype), cache, places)


WRITE_INDEX_KEYS = OpSpec(
    name="precast.write_index_keys",
    axes={"k": "1 T D", "cache": "P S D", "slot_mapping": "T"},
    results={},
    dtypes={"k": FLOAT, "cache": STORED, "slot_mapping": (torch.int64,)},
    reference=write_index_keys,
)
