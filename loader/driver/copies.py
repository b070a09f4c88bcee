"""Copies on the device of what stands otherwise in a checkpoint than in memory: params whose rows and columns are
exchanged, and words in another order. A kernel of the native layer reads pinned memory, and writes where elements
belong."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeAlias

import msgspec

from precast.ir.native import NO_ARGUMENT, NativeKernel, NativeLayer
from precast.ir.weights.tensorfile import element_bytes
from precast.kernels.native import Native
from precast.kernels.without_torch.copies import REARRANGED, REPACKED, rearranged_key, repacked_key
from precast.loader.device import Buffer
from precast.loader.driver.device import DriverDevice, LoadedKernel
from precast.loader.driver.launches import Prepared
from precast.loader.driver.param_plan import Planned, kernel_arguments
from precast.loader.weights.read_plan import Copy
from precast.loader.weights.views import View


class Copies:
    """The kernels of a layer that copy elements, and the `targets` that they make."""

    def __init__(self, what: Planned, layer: NativeLayer, device: DriverDevice) -> None:
        """Loads those that the plan takes; others of its targets, and all if the layer has none, stay on the host."""
        self._device = device
        native = Native(layer)
        self._there = frozenset(key for key in _KEYS.values() if native.of_key(key))
        wanted: defaultdict[int, set[str]] = defaultdict(set)
        for copy in (copy for job in what.plan.jobs for copy in job.copies if copy.target in what.on_device):
            wanted[copy.target].add(_key(self._widest(copy)))
        self._kernels = loaded_kernels(set().union(*wanted.values()), native, device)
        self.targets = frozenset(i for i, keys in wanted.items() if keys <= self._kernels.keys())

    def put(self, copy: Copy, staged: int, address: int, stream: int) -> None:
        """Put what a job has staged, at an address of pinned memory, into a target, whose address this is."""
        copy = self._widest(copy)
        size = element_bytes(copy.dtype)
        kernel = self._kernels[_key(copy)]
        found = kernel_arguments(copy)
        assert found is not None, "planned"
        grid, numbers = found
        values = (staged + copy.offset + size * copy.source.offset, address + size * copy.destination.offset, *numbers)
        launch(kernel, grid, values, stream)

    def _widest(self, copy: Copy) -> Copy:
        """The copy, of as large elements as there is a kernel for: one that reads bytes of the host's memory takes
        longer than one that reads words of it."""
        *_, found = copy, *(each for each in _widened(copy) if _key(each) in self._there)
        return found

    def room(self, num_bytes: int) -> Buffer:
        """Pinned memory."""
        return self._device.alloc(num_bytes, pinned=True)


_KEYS: Mapping[int | str, str] = {
    **{size: rearranged_key(dtype)[0] for size, dtype in REARRANGED.items()},
    **{part: repacked_key(part)[0] for part in REPACKED},
}
"""Of each kernel its key, by the bytes of elements, or the part of a weight whose words it repacks."""


def _key(copy: Copy) -> str:
    """The key of its kernel; empty where there is none for elements of its size."""
    return _KEYS.get(copy.repack or element_bytes(copy.dtype), "")


def _widened(copy: Copy) -> Iterator[Copy]:
    """The same copy of elements twice as large, and again, as far as those lie side by side at both ends."""
    while (
        copy.repack is None
        and (size := 2 * element_bytes(copy.dtype)) in REARRANGED
        and not copy.offset % size
        and _is_in_pairs(copy.source)
        and _is_in_pairs(copy.destination)
    ):
        views = {"source": _paired(copy.source), "destination": _paired(copy.destination)}
        copy = msgspec.structs.replace(copy, dtype=REARRANGED[size], **views)
        yield copy


def _is_in_pairs(view: View) -> bool:
    *outer, step = view.strides or (0,)
    return step == 1 and not any(number % 2 for number in (view.shape[-1], view.offset, *outer))


def _paired(view: View) -> View:
    *outer, step = view.strides
    return View(view.offset // 2, (*view.shape[:-1], view.shape[-1] // 2), (*(each // 2 for each in outer), step))


Kernel: TypeAlias = tuple[NativeKernel, LoadedKernel]
"""What the layer says of a kernel, and its function."""


def launch(kernel: Kernel, grid: tuple[int, int, int], values: Sequence[int], stream: int | None = None) -> None:
    """Launch a kernel that a load takes, with the arguments of its `Launch`."""
    known, loaded = kernel
    params = [None if each.argument == NO_ARGUMENT else values[each.argument] for each in known.params]
    Prepared(loaded.handle, grid, (known.threads, 1, 1), known.shared_bytes, params).launch(stream or 0)


def loaded_kernels(keys: Collection[str], native: Native, device: DriverDevice) -> Mapping[str, Kernel]:
    """Those of these keys that the layer has."""
    found = {}
    for key in sorted(keys):
        for kernel in native.of_key(key):
            loaded = device.load(native.image(kernel), kernel.function)
            assert isinstance(loaded, LoadedKernel)
            found[key] = kernel, loaded
    return found
