"""write_kv@1: k_cache[slot // S, slot % S] = k[0, t] and v_cache likewise, for each token t with
slot = slot_mapping[t] >= 0. Tokens with slot -1 are padding and write nothing. Values are rounded to the cache's dtype,
and saturated to the largest finite value of 8 bits; with scales they are divided by them before
(`precast.kernels.storage`).
"""

from __future__ import annotations

import torch

from precast.kernels.dtypes import FLOAT
from precast.kernels.spec import OpSpec
from precast.kernels.storage import STORED, places_of, rounded, store


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Write `k` [1, T, K, D] and `v` [1, T, K, Dv] into `k_cache` [P, S, K, D] and `v_cache` [P, S, K, Dv].

    `slot_mapping` [T] int64: page * S + offset, each slot at most once, or -1. `k_scale`, `v_scale` [1] float32, above
    0, of caches of 8 bits. `k` and `v` stay as they are. Nothing is read back to the host.
    """
    if slot_mapping.shape[0] == 0 or k_cache.shape[0] == 0:
        return
    places = places_of(slot_mapping, k_cache.shape[1])
    for new, pages, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        rows = rounded(new[0, places.source], pages.dtype, scale)
        store(rows, pages, places)


WRITE_KV = OpSpec(
    name="precast.write_kv",
    axes={
        "k": "1 T K D", "v": "1 T K E", "k_cache": "P S K D", "v_cache": "P S K E", "slot_mapping": "T",
        "k_scale": "1", "v_scale": "1",
    },
    results={},
    dtypes={
        "k": FLOAT, "v": FLOAT, "k_cache": STORED, "v_cache": STORED, "slot_mapping": (torch.int64,),
        "k_scale": (torch.float32,), "v_scale": (torch.float32,),
    },
    reference=write_kv,
)  # fmt: skip
