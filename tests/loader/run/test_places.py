"""Inputs at fixed places: the same addresses in every step, and copies of what is used."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_graph

from precast.ir.memory import caches
from precast.loader.cache.memory import CacheMemory
from precast.loader.device import Buffer, host_bytes
from precast.loader.run.batch import Arrays, Padding
from precast.loader.run.places import ALIGNMENT, GAP_BYTES, Layout, Places, joined
from precast.loader.run.runner import Runner
from precast.loader.sizing import EngineLimits, size_arena
from precast.loader.torch_device import CpuDevice, open_device

CAPACITIES: Any = {"list": ("int32", 100_001), "a": ("int32", 5), "b": ("int64", 3), "c": ("float32", 8)}


class CopyingDevice(CpuDevice):
    """A CPU that has memory of its own, as a GPU has: what is copied is noted."""

    kind = "cuda"

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[int] = []

    def copy(self, target: Buffer, source: Buffer, stream: Any = None) -> None:
        self.copied.append(target.shape[0])
        super().copy(target, source, stream)


@pytest.fixture(params=["cpu", "copying", pytest.param("cuda", marks=pytest.mark.gpu)])
def places(request: pytest.FixtureRequest) -> Places:
    return Places(CAPACITIES, CopyingDevice() if request.param == "copying" else open_device(request.param))


class CountingDevice(CopyingDevice):
    """Notes what it allocates: how many bytes, and whether they are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[tuple[int, weakref.ref[object]]] = []

    def alloc(self, num_bytes: int, *, pinned: bool = False) -> Buffer:
        buffer = super().alloc(num_bytes, pinned=pinned)
        self.allocated.append((num_bytes, weakref.ref(buffer.owner)))
        return buffer


def test_the_places_of_a_runner_are_counted_and_are_freed_with_it() -> None:
    graph, limits, device = tiny_graph(), EngineLimits(5, 64, 200), CountingDevice()
    graph = msgspec.structs.replace(graph, caches=caches.with_slabs(graph.caches))
    size = size_arena(graph, limits, device, free=2**30)
    memory = CacheMemory(graph.caches, size.num_slabs, CpuDevice())
    runner = Runner(dict, graph, memory, device, limits)
    # The device's side and the host's two; what the last step drew, and on the host what two steps did.
    assert [num_bytes for num_bytes, _ in device.allocated] == [size.inputs] * 3 + [8 * limits.max_num_seqs] * 3

    device.kind = "cpu"  # there is no cache of CUDA's allocator to empty
    runner.close()

    assert [alive() for _, alive in device.allocated] == [None] * 6


PASSED = CpuDevice().event()


def fill(places: Places, arrays: Arrays, layout: Layout | None = None) -> None:
    """Fill them; what is copied is there when this returns."""
    places.fill(arrays, PASSED, layout)
    if places.widest.tensors["a"].is_cuda:
        torch.cuda.synchronize()


def step(count: int) -> Arrays:
    return {
        "a": np.arange(count, dtype=np.int32),
        "c": np.arange(count, dtype=np.float32) / 2,
        "list": np.arange(1000 * count, dtype=np.int32),
        "b": np.arange(min(count, 3)) + 2**40,
    }


def test_each_step_finds_its_arrays_at_the_same_addresses(places: Places) -> None:
    addresses = set()
    for count in (1, 5, 0, 3):
        arrays = step(count)
        fill(places, arrays)
        tensors = places.filled({name: len(values) for name, values in arrays.items()})
        assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
            name: values.tolist() for name, values in arrays.items()
        }
        expected = {"a": torch.int32, "c": torch.float32, "list": torch.int32, "b": torch.int64}
        assert {name: tensor.dtype for name, tensor in tensors.items()} == expected
        if count:
            addresses.add(tuple(tensor.data_ptr() for tensor in tensors.values()))
            assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors.values())
    assert len(addresses) == 1


def test_short_inputs_take_one_copy_and_of_lists_what_is_used() -> None:
    device = CopyingDevice()
    lists: Any = {"long": ("int32", 10**6), "longer": ("int32", 2 * 10**6)}
    places = Places({**CAPACITIES, **lists}, device)
    used = {"long": np.arange(50, dtype=np.int32), "longer": np.arange(7, dtype=np.int32)}

    fill(places, {"a": np.zeros(5, np.int32), "c": np.zeros(1, np.float32), "b": np.zeros(2, np.int64), **used})

    # a, b, c and the beginning of `long` would be one range but for `list` between them, of which nothing is used.
    assert device.copied == [96, 4096, 4096]
    assert {name: tensor.tolist() for name, tensor in places.filled({"long": 50, "longer": 7}).items()} == {
        name: values.tolist() for name, values in used.items()
    }


class DirtyDevice(CopyingDevice):
    """Its memory holds something else when it is allocated."""

    def alloc(self, num_bytes: int, *, pinned: bool = False) -> Buffer:
        buffer = super().alloc(num_bytes, pinned=pinned)
        host_bytes(buffer)[:] = bytes([0xFF]) * num_bytes
        return buffer


def test_behind_what_is_filled_there_are_zeros_at_first() -> None:
    """Of a list a whole chunk is copied, or all of its place."""
    places = Places(CAPACITIES, DirtyDevice())

    fill(places, {"a": np.array([7, 8], np.int32), "list": np.array([9], np.int32)})

    assert places.widest.tensors["a"].tolist() == [7, 8, 0, 0, 0]
    assert places.widest.tensors["list"].tolist() == [9] + [0] * 100_000


def test_in_a_layout_of_its_own_a_step_takes_one_copy_of_what_it_uses() -> None:
    """As it is for a decode step: arrays that could be as long as the largest step, and one list."""
    device = CopyingDevice()
    places = Places(dict.fromkeys("abc", ("int64", 8192)) | {"list": ("int32", 100_000)}, device)
    layout = places.layout({"a": Padding(4, 0), "b": Padding(2, 0), "c": Padding(4, -1)})
    for length in (7, 900, 1024, 1025, 1024):
        places.fill(
            {name: np.ones(2, np.int64) for name in "abc"} | {"list": np.full(length, 9, np.int32)}, PASSED, layout
        )
        assert layout.tensors["a"].tolist() == [1, 1, 0, 0]
        assert layout.tensors["b"].tolist() == [1, 1]
        assert layout.tensors["c"].tolist() == [1, 1, -1, -1]
        assert layout.tensors["list"][:length].tolist() == [9] * length

    assert device.copied == [80 + 4096] * 3 + [80 + 8192, 80 + 4096]
    assert layout.tensors["b"].data_ptr() == places.address, "the shortest is the first"


def test_layouts_share_their_memory_and_each_step_writes_its_own(places: Places) -> None:
    """What one layout has written is never taken for what another one holds."""
    fixed = np.array([1, 2], np.int32)
    fixed.flags.writeable = False
    other = np.arange(8, dtype=np.float32)
    cases = [
        (places.widest, [1, 2]),
        (places.layout({"a": Padding(3, -1)}), [1, 2, -1]),
        (places.layout({"a": Padding(4, 0), "c": Padding(8, 0)}), [1, 2, 0, 0]),
    ]
    for layout, expected in [*cases, *cases, *cases[::-1]]:
        fill(places, {"a": fixed, "c": other}, layout)
        assert layout.tensors["a"][: len(expected)].tolist() == expected
        assert layout.tensors["c"].tolist() == other.tolist()


def test_arrays_are_made_longer_with_a_number_or_with_their_last_one(places: Places) -> None:
    fill(places, {name: np.full(length, 31, dtype) for name, (dtype, length) in CAPACITIES.items()})

    layout = places.layout({"a": Padding(4, -1), "b": Padding(3, None), "c": Padding(2, 1.0)})
    fill(places, {"a": np.array([1, 2], np.int32), "b": np.array([7, 9]), "c": np.zeros(0, np.float32)}, layout)

    found = {name: layout.tensors[name].tolist() for name in ("a", "b", "c")}
    assert found == {"a": [1, 2, -1, -1], "b": [7, 9, 9], "c": [1.0, 1.0]}


def test_what_stays_is_right_whatever_is_written_between(places: Places) -> None:
    """The same array that can't be written to, in steps of one layout, of another, and of the widest in between."""
    fixed, other = np.array([1, 2], np.int32), np.array([8, 9], np.int32)
    for values in (fixed, other):
        values.flags.writeable = False
    short, long = places.layout({"a": Padding(3, -1)}), places.layout({"a": Padding(4, 0)})
    for values, layout, expected in (
        *[(fixed, short, [1, 2, -1])] * 3,
        *[(other, short, [8, 9, -1])] * 2,
        *[(fixed, long, [1, 2, 0, 0])] * 3,
        (other, None, [8, 9]),
        *[(fixed, short, [1, 2, -1])] * 3,
    ):
        fill(places, {"a": values, "c": np.zeros(8, np.float32)}, layout)
        assert (layout or places.widest).tensors["a"][: len(expected)].tolist() == expected


def test_an_array_that_was_changed_is_written_again(places: Places) -> None:
    layout = places.layout({"b": Padding(3, 0)})
    values = np.array([4, 5])
    for first in range(5):
        values[0] = first
        fill(places, {"b": values}, layout)
        assert layout.tensors["b"].tolist() == [first, 5, 0]


class Waited:
    """An event that says when it is waited for."""

    def __init__(self) -> None:
        self.num_waits = 0

    def record(self, stream: Any = None) -> None:
        """Nothing to note."""

    wait = record

    def synchronize(self) -> None:
        self.num_waits += 1


def test_memory_is_filled_again_when_what_follows_its_copies_is_passed() -> None:
    """Two memories take turns; whoever has waited already need not wait again."""
    places = Places(CAPACITIES, CopyingDevice())
    events = [Waited() for _ in range(5)]
    seen = []
    for i, event in enumerate(events):
        if i == 4:
            places.passed(events[2])
        places.fill(step(1), event)
        seen.append([each.num_waits for each in events])

    assert seen == [[0] * 5, [0] * 5, [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 0, 0, 0]]


@given(st.lists(st.tuples(st.integers(0, 3 * GAP_BYTES), st.integers(0, 2 * GAP_BYTES)), max_size=9))
def test_ranges_are_joined_over_short_gaps(gaps: list[tuple[int, int]]) -> None:
    ranges, end = [], 0
    for gap, length in gaps:
        ranges.append((end + gap, end + gap + length))
        end = ranges[-1][1]

    found = list(joined(ranges))

    assert all(any(first <= start and end <= last for first, last in found) for start, end in ranges)
    assert all(after[0] - before[1] >= GAP_BYTES for before, after in itertools.pairwise(found))
    assert {edge for one in found for edge in one} <= {edge for one in ranges for edge in one}


def test_what_is_longer_than_its_place_is_not_cut() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        fill(Places(CAPACITIES, open_device("cpu")), {"a": np.zeros(6, np.int32)})
