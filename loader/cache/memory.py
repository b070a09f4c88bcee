"""The cache memory on the device: one arena tensor, and the cache tensors of all slots as strided views of it.

Page `p` of a pool begins at byte `p * page_stride` of the arena (`precast.ir.memory.caches`). So every pool's tensors
cover the whole arena, each in steps of its own; which pages are whose is what `precast.loader.cache.tables` knows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from precast.ir.graph import symbols
from precast.ir.graph.schema import CachePlan
from precast.ir.memory import caches
from precast.kernels.dtypes import BY_NAME


class CacheMemory:
    """`num_slabs` slabs of a plan, uninitialised: what no token wrote enters no product (`precast.kernels`).

    `tensors` are the cache tensors by name: `[num_pages, ...]`, contiguous from the second dimension on.
    """

    def __init__(self, plan: CachePlan, num_slabs: int, device: torch.device) -> None:
        """Slabs are those of the plan, or for a plan without them those of `caches.with_slabs`."""
        self.plan = caches.with_slabs(plan)
        self.num_slabs = num_slabs
        self.arena = torch.empty(num_slabs * self.plan.slab_bytes, dtype=torch.uint8, device=device)
        self.num_pages = {pool.name: num_slabs * pool.pages_per_slab for pool in self.plan.pools}
        self._pages = {
            group.name: self.arena.view(-1, caches.page_stride(self.plan, group.pool))[:, : caches.page_bytes(group)]
            for group in caches.groups(self.plan)
        }
        self.tensors = self._views()

    def copy_page(self, group: str, source: int, target: int) -> None:
        """Copy a page of a group, all its layers, onto another; in the order of the device's stream."""
        pages = self._pages[group]
        pages[target].copy_(pages[source], non_blocking=True)

    def _views(self) -> Mapping[str, torch.Tensor]:
        counters = {pool.pages: self.num_pages[pool.name] for pool in self.plan.pools}
        tensors = {}
        for group in caches.groups(self.plan):
            stride, offsets = caches.page_stride(self.plan, group.pool), caches.page_layout(group)
            for value in (value for slot in group.slots for value in slot.tensors):
                dtype = BY_NAME[value.type.dtype]
                shape = [symbols.evaluate(size, counters) for size in value.type.shape]
                inner = [math.prod(shape[i + 1 :]) for i in range(1, len(shape))]
                tensors[value.name] = self.arena.view(dtype).as_strided(
                    shape, [stride // dtype.itemsize, *inner], offsets[value.name] // dtype.itemsize
                )
        return tensors
