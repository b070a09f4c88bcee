"""Fixed memory for the inputs of a step: each has a place on the device, with the same address in every step.

The places lie one after the other, the shortest first, each as long as the engine's limits let its array become. Pinned
memory of the host is laid out in the same way, twice: one is filled while the other's copies may still be under way. A
step's arrays are written there, each from the beginning of its place,
and what they fill is copied to the device. Filled ranges less than `GAP_BYTES` apart are copied together, so all short
inputs take one copy; of a page list, which can be megabytes long, only what the step filled is copied. On a CPU the
host's memory is the device's, and nothing is copied.

What a step leaves as it was, such as how tokens are drawn, is the same array as in the step before, and is not written
to the host's memory again.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping

import numpy as np
import torch

from precast.ir.graph.schema import Dtype
from precast.loader.device import Buffer, Device, Event, aligned, host_bytes
from precast.loader.run.batch import Array, Arrays, Padding
from precast.loader.torch_device import tensor_of

ALIGNMENT = 16
"""Bytes to which each place is aligned: the widest load that a kernel issues."""
Capacities = Mapping[str, tuple[Dtype, int]]
"""Of each array its dtype and how long it can become."""
GAP_BYTES = 1 << 16
"""What a link of 25 to 50 GB/s moves in the 2 microseconds that one more copy takes."""


class Places:
    """Memory for arrays by name, on the device and on the host. `tensors` are the whole places, `[length]` each."""

    def __init__(self, capacities: Capacities, device: Device) -> None:
        self._device = device
        order = sorted(capacities, key=lambda name: _num_bytes(*capacities[name]))
        sizes = (_num_bytes(*capacities[name]) for name in order)
        starts = dict(zip(order, itertools.accumulate(sizes, initial=0), strict=False))
        # Where each place begins and what one element takes, in bytes, in the order of the places.
        self._extents = {name: (starts[name], np.dtype(capacities[name][0]).itemsize) for name in order}
        num_bytes = places_bytes(capacities)
        self._target = device.alloc(num_bytes)
        on_host = [self._target] if device.kind == "cpu" else [device.alloc(num_bytes, pinned=True) for _ in range(2)]
        self._hosts = deque(_Host(source, capacities, starts, device.event()) for source in on_host)
        self._lengths: dict[str, int] = {}  # of the arrays that were copied last, and the ranges of bytes of these
        self._ranges: list[tuple[int, int]] = []
        # Whoever looks at a whole place finds numbers there that the host has written, zeros at first.
        tensor_of(self._target).zero_()
        self.tensors = {
            name: tensor_of(self._target.view(starts[name], (length,), dtype=dtype))
            for name, (dtype, length) in capacities.items()
        }

    @property
    def address(self) -> int:
        """Where the places begin on the device."""
        return self._target.pointer

    def fill(self, arrays: Arrays, padding: Mapping[str, Padding] | None = None) -> None:
        """Put the arrays in their places, made longer as `padding` says.

        An array that can't be written to must not change in other ways either: where the same one is given again, it
        is not written again. Copies are made in the order of the device's current stream.
        """
        self._hosts.rotate()
        host = self._hosts[0]
        host.copied.synchronize()  # copies of the step before the last may still read it
        lengths = host.write(arrays, padding or {})
        if host.source is self._target:
            return
        if lengths != self._lengths:
            self._lengths, self._ranges = lengths, joined(self._used(lengths))
        for start, end in self._ranges:
            size = (end - start,)
            self._device.copy(self._target.view(start, size), host.source.view(start, size))
        host.copied.record()

    def filled(self, arrays: Arrays) -> dict[str, torch.Tensor]:
        """The arrays that fill the places, as tensors `[len]` on the device, by name. They hold until the next step."""
        return {name: self.tensors[name][: len(values)] for name, values in arrays.items()}

    def _used(self, lengths: Mapping[str, int]) -> Iterable[tuple[int, int]]:
        """Of arrays of these lengths, where each begins and ends, in bytes and in their order."""
        for name, (start, item_bytes) in self._extents.items():
            if name in lengths:
                yield start, start + item_bytes * lengths[name]


class _Host:
    """Memory of the host in the layout of the places: `copied` is passed when the device has what was written there."""

    def __init__(self, source: Buffer, capacities: Capacities, starts: Mapping[str, int], copied: Event) -> None:
        memory = host_bytes(source)
        self.source = source
        self.copied = copied
        self.arrays: dict[str, Array] = {
            name: np.frombuffer(memory, dtype, length, starts[name]) for name, (dtype, length) in capacities.items()
        }
        self._written: dict[str, Array] = {}
        self._padding: Mapping[str, Padding] | None = None

    def write(self, arrays: Arrays, padding: Mapping[str, Padding]) -> dict[str, int]:
        """Write the arrays with their padding; how long they are then.

        One that can't be written to is left out if it is what was written here the last time, with the same padding.
        """
        written = self._written if padding is self._padding else {}
        self._written, self._padding = arrays, padding
        lengths = {}
        for name, values in arrays.items():
            count = len(values)
            length, fill = padding.get(name, (count, 0))
            lengths[name] = length
            if written.get(name) is values and not values.flags.writeable:
                continue
            place = self.arrays[name]
            place[:count] = values
            if count < length:
                place[count:length] = values[-1] if fill is None else fill
        return lengths


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges of bytes, which are in order, with those made one that lie less than `GAP_BYTES` apart."""
    whole: list[tuple[int, int]] = []
    for start, end in ranges:
        if whole and start - whole[-1][1] < GAP_BYTES:
            whole[-1] = whole[-1][0], end
        else:
            whole.append((start, end))
    return whole


def places_bytes(capacities: Capacities) -> int:
    """What `Places` take for these arrays: on the device, and on a GPU twice as much pinned memory of the host."""
    return sum(itertools.starmap(_num_bytes, capacities.values()))


def _num_bytes(dtype: Dtype, length: int) -> int:
    return aligned(int(np.dtype(dtype).itemsize) * length, ALIGNMENT)
