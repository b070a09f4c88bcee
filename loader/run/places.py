"""Fixed memory for the inputs of a step: in all steps of one layout each has a place with the same address.

A layout puts places one after the other, the shortest first. In the widest one each is as long as the engine's limits
let its array become. A captured step has a layout of its own, in which each is as long as that step's array, and what
it reads is a few kilobytes at the beginning; page lists, whose length varies, come last. Pinned memory of the host is
laid out in the same way, twice: one is filled while the other's copies may still be under way. A step's arrays are
written there, each from the beginning of its place, and what they fill is copied to the device. Filled ranges less than
`GAP_BYTES` apart are copied together, so a decode step takes one copy; of a page list, which can be megabytes long,
only what the step filled is copied, in whole chunks of `CHUNK_LENGTH`. So nearly all steps copy the same ranges as the
step before, though lists grow. On a CPU the host's memory is the device's, and nothing is copied.

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
from precast.loader.torch_device import cut_out, tensor_of
from precast.loader.world.orders import Part

ALIGNMENT = 16
"""Bytes to which each place is aligned: the widest load that a kernel issues."""
CHUNK_LENGTH = 1024
"""Of an array whole chunks of so many elements are copied, or all of its place. What lies behind the array is not read.
"""
Capacities = Mapping[str, tuple[Dtype, int]]
"""Of each array its dtype and how long it can become."""
GAP_BYTES = 1 << 16
"""What a link of 25 to 50 GB/s moves in the 2 microseconds that one more copy takes."""


class Layout:
    """Where the array of each name lies, in memory of the host and of the device.

    `tensors` are the whole places on the device, `[length]` each. `padding`: how arrays are made as long as a captured
    step's; those that it doesn't name are left as they are.
    """

    def __init__(
        self, capacities: Capacities, padding: Mapping[str, Padding], target: Buffer, sources: Iterable[Buffer]
    ) -> None:
        self.padding = padding
        sizes = {name: _bytes_of(capacity) for name, capacity in capacities.items()}
        order = sorted(sizes, key=lambda name: (bool(padding) and name not in padding, sizes[name]))
        ends = itertools.accumulate((sizes[name] for name in order), initial=0)
        starts = dict(zip(order, ends, strict=False))
        # Where each place begins, how long it is and what one element takes, in bytes, in the order of the places.
        self._extents = {name: (starts[name], sizes[name], np.dtype(capacities[name][0]).itemsize) for name in order}
        self.tensors = {
            name: tensor_of(target.view(starts[name], (length,), dtype=dtype))
            for name, (dtype, length) in capacities.items()
        }
        memories = map(host_bytes, sources)
        self.arrays: list[dict[str, Array]] = [
            {name: np.frombuffer(memory, dtype, length, starts[name]) for name, (dtype, length) in capacities.items()}
            for memory in memories
        ]
        self._lengths: dict[str, int] = {}  # of the last step's copies, and the ranges of bytes of these
        self._ranges: list[tuple[int, int]] = []

    def ranges(self, lengths: dict[str, int]) -> list[tuple[int, int]]:
        """Where so many elements of each array's place begin and end, in bytes; none beyond a place."""
        if lengths != self._lengths:
            self._lengths, self._ranges = lengths, joined(self._used(lengths))
        return self._ranges

    def _used(self, lengths: Mapping[str, int]) -> Iterable[tuple[int, int]]:
        """Of each array, in order."""
        for name, (start, num_bytes, item_bytes) in self._extents.items():
            if name in lengths:
                yield start, start + min(item_bytes * lengths[name], num_bytes)


class Places:
    """Memory for arrays by name, on the device and on the host; `widest` is the layout of steps of any size."""

    def __init__(self, capacities: Capacities, device: Device) -> None:
        self._device = device
        self._capacities = capacities
        num_bytes = places_bytes(capacities)
        self._target = device.alloc(num_bytes)
        on_host = [self._target] if device.kind == "cpu" else [device.alloc(num_bytes, pinned=True) for _ in range(2)]
        self._hosts = deque(_Host(i, source) for i, source in enumerate(on_host))
        # Whoever looks at a whole place finds numbers there that the host has written, zeros at first.
        for memory in (self._target, *on_host):
            tensor_of(memory).zero_()
        self.widest = Layout(capacities, {}, self._target, on_host)

    @property
    def address(self) -> int:
        """Where the places begin on the device, in each layout."""
        return self._target.pointer

    def layout(self, padding: Mapping[str, Padding]) -> Layout:
        """A layout for steps whose arrays are made as long as `padding` says; those without it may have any length."""
        fitting: Capacities = {
            name: (dtype, padding[name].length if name in padding else most)
            for name, (dtype, most) in self._capacities.items()
        }
        assert all(length <= self._capacities[name][1] for name, (_, length) in fitting.items()), "beyond the limits"
        sources = sorted(self._hosts, key=lambda host: host.index)
        return Layout(fitting, padding, self._target, [host.source for host in sources])

    def fill(self, arrays: Arrays, until: Event, layout: Layout | None = None) -> None:
        """Put the arrays in their places, made longer as the layout says. None: the widest.

        An array that can't be written to must not change in other ways either: where the same one is given again, it
        is not written again. Copies are made in the order of the device's current stream, on which the caller records
        `until` afterwards: the host's memory is not filled again before that is passed.
        """
        layout = layout or self.widest
        self.copy(self.write(arrays, layout), until, layout)

    def write(self, arrays: Arrays, layout: Layout) -> dict[str, int]:
        """Put the arrays in the host's memory, as `fill` does; how much of each `copy` has to copy."""
        return self._next_host().write(arrays, layout)

    def copy(self, lengths: dict[str, int], until: Event, layout: Layout) -> None:
        """Copy what was written last to the device, as `fill` does."""
        host = self._hosts[0]
        if host.source is not self._target:
            self._copy(host, layout.ranges(lengths), until)

    def written(self, lengths: dict[str, int], layout: Layout) -> list[Part]:
        """What `copy` copies: it has to reach the places of all ranks."""
        memory = self._hosts[0].memory
        return [Part(start, memory[start:end]) for start, end in layout.ranges(lengths)]

    def receive(self, parts: Iterable[Part], until: Event) -> None:
        """Put what another rank has written in the places of this one; `until` as in `fill`."""
        host = self._next_host()
        host.forget()
        ranges = [(part.start, part.start + len(part.data)) for part in parts]
        for (start, end), part in zip(ranges, parts, strict=True):
            host.memory[start:end] = part.data
        if host.source is not self._target:
            self._copy(host, ranges, until)

    def _next_host(self) -> _Host:
        self._hosts.rotate()
        host = self._hosts[0]
        if host.until is not None:
            host.until.synchronize()  # copies of the step before the last may still read it
        return host

    def _copy(self, host: _Host, ranges: list[tuple[int, int]], until: Event) -> None:
        host.until = until
        for into, values in host.copies(ranges, self._target):
            self._device.copy(into, values)

    def passed(self, event: Event) -> None:
        """The caller has waited for this event since it was recorded last."""
        for host in self._hosts:
            if host.until is event:
                host.until = None

    def filled(self, lengths: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """The arrays of these lengths that fill the widest layout, as tensors on the device, until the next step."""
        return {name: self.widest.tensors[name][:length] for name, length in lengths.items()}


class _Host:
    """Memory of the host: which one, and what is passed when the device has what was written there last."""

    def __init__(self, index: int, source: Buffer) -> None:
        self.index = index
        self.source = source
        self.memory = host_bytes(source)
        self.until: Event | None = None
        self._written: dict[str, Array] = {}
        self._layout: Layout | None = None
        self._ranges: list[tuple[int, int]] = []  # of the last copies
        self._copies: list[tuple[Buffer, Buffer]] = []

    def write(self, arrays: Arrays, layout: Layout) -> dict[str, int]:
        """Write the arrays with their padding; how much of each is to be copied, in whole chunks.

        One that can't be written to is left out if it is what was written here the last time, in the same layout.
        """
        written = self._written if layout is self._layout else {}
        self._written, self._layout = arrays, layout
        places, padding = layout.arrays[self.index], layout.padding
        lengths = {}
        for name, values in arrays.items():
            count = len(values)
            length, fill = padding.get(name, (count, 0))
            lengths[name] = -(-length // CHUNK_LENGTH) * CHUNK_LENGTH
            if written.get(name) is values and not values.flags.writeable:
                continue
            place = places[name]
            place[:count] = values
            if count < length:
                place[count:length] = values[-1] if fill is None else fill
        return lengths

    def forget(self) -> None:
        """What was written is written over by others."""
        self._written, self._layout = {}, None

    def copies(self, ranges: list[tuple[int, int]], target: Buffer) -> list[tuple[Buffer, Buffer]]:
        """For each range of bytes: where on the target it is copied to, and from where. `target` is always the same."""
        if ranges != self._ranges:
            self._ranges = ranges
            self._copies = [
                (cut_out(target, start, end - start), cut_out(self.source, start, end - start)) for start, end in ranges
            ]
        return self._copies


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
    return sum(map(_bytes_of, capacities.values()))


def _bytes_of(capacity: tuple[Dtype, int]) -> int:
    dtype, length = capacity
    return aligned(int(np.dtype(dtype).itemsize) * length, ALIGNMENT)
