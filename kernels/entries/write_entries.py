"""write_entries@1: cache[slot // (S * rate), slot % (S * rate) // rate] = entries[0, t], for each token t with
slot = slot_mapping[t] >= 0 that is the last of its block, `(slot + 1) % rate == 0`. A page begins with a block, so that
a slot says where in its block a token stands. What stands at other tokens is written nowhere, and neither is what has
slot -1, which is padding. Values are rounded to the cache's dtype, and saturated to the largest finite value of 8 bits
(`precast.kernels.storage`).
"""

from __future__ import annotations

import torch

from precast.kernels.dtypes import FLOAT
from precast.kernels.spec import OpSpec
from precast.kernels.storage import STORED, places_of, rounded, store


def write_entries(entries: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, *, rate: int) -> None:
    """Write `entries` [1, T, D] into `cache` [P, S, D].

    `slot_mapping` [T] int64: page * S * rate + offset, each slot at most once, or -1. Nothing is read back to the host.
    """
    if slot_mapping.shape[0] == 0 or cache.shape[0] == 0:
        return
    is_last = (slot_mapping >= 0) & ((slot_mapping + 1) % rate == 0)
    places = places_of(torch.where(is_last, slot_mapping // rate, -1), cache.shape[1])
    store(rounded(entries[0, places.source], cache.dtype), cache, places)


WRITE_ENTRIES = OpSpec(
    name="precast.write_entries",
    axes={"entries": "1 T D", "cache": "P S D", "slot_mapping": "T"},
    results={},
    dtypes={"entries": FLOAT, "cache": STORED, "slot_mapping": (torch.int64,)},
    reference=write_entries,
)
