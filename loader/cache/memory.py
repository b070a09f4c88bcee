"""The cache memory on the device: one arena tensor, and the cache tensors of all slots as strided views of it.

Page `p` of a pool begins at byte `p * page_stride` of the arena (`precast.ir.memory.caches`). So every pool's tensors
cover the whole arena, each in steps of its own; which pages are whose is what `precast.loader.cache.tables` knows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from precast.ir.graph import symbols
from precast.ir.graph.schema import CachePlan
from precast.ir.memory import caches
from precast.ir.weights.tensorfile import element_bytes
from precast.loader.device import Buffer, Device

if TYPE_CHECKING:
    import torch


class CacheMemory:
    """`num_slabs` slabs of a plan, uninitialised: what no token wrote enters no product (`precast.kernels`).

    `buffers` are the cache tensors by name: `[num_pages, ...]`, contiguous from the second dimension on.
    """

    def __init__(self, plan: CachePlan, num_slabs: int, device: Device) -> None:
        """Slabs are those of the plan, or for a plan without them those of `caches.with_slabs`."""
        self.plan = caches.with_slabs(plan)
        self.num_slabs = num_slabs
        self.num_pages = {pool.name: num_slabs * pool.pages_per_slab for pool in self.plan.pools}
        self._device = device
        self._arena = device.alloc(num_slabs * self.plan.slab_bytes)
        self._groups = {group.name: group for group in caches.groups(self.plan)}
        self.buffers: Mapping[str, Buffer] = self._buffers()

    @cached_property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The cache tensors of torch, on a device of torch's."""
        from precast.loader.torch_device import tensor_of

        return {name: tensor_of(each) for name, each in self.buffers.items()}

    @property
    def arena(self) -> torch.Tensor:
        """All of the memory, as bytes, on a device of torch's."""
        from precast.loader.torch_device import tensor_of

        return tensor_of(self._arena)

    def copy_page(self, group: str, source: int, target: int) -> None:
        """Copy a page of a group, all its layers, onto another; in the order of the device's stream."""
        self._device.copy(self._page(group, target), self._page(group, source))

    def _page(self, name: str, page: int) -> Buffer:
        group = self._groups[name]
        start = page * caches.page_stride(self.plan, group.pool)
        return self._arena.view(start, (caches.page_bytes(group),))

    def _buffers(self) -> dict[str, Buffer]:
        counters = {pool.pages: self.num_pages[pool.name] for pool in self.plan.pools}
        buffers = {}
        for group in self._groups.values():
            stride, offsets = caches.page_stride(self.plan, group.pool), caches.page_layout(group)
            for value in (value for slot in group.slots for value in slot.tensors):
                dtype = value.type.dtype
                shape = tuple(symbols.evaluate(size, counters) for size in value.type.shape)
                inner = (math.prod(shape[i + 1 :]) for i in range(1, len(shape)))
                strides = (stride // element_bytes(dtype), *inner)
                buffers[value.name] = self._arena.view(offsets[value.name], shape, strides=strides, dtype=dtype)
        return buffers
