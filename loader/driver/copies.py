"""Copies on the device of what stands otherwise in a checkpoint than in memory: params whose rows and columns are
exchanged. A kernel of the native layer reads pinned memory, and writes where elements belong."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from precast.ir.native import NO_ARGUMENT, NativeKernel, NativeLayer
from precast.ir.weights.tensorfile import element_bytes
from precast.kernels.native import Native
from precast.kernels.without_torch.copies import REARRANGED, rearranged_arguments, rearranged_key
from precast.loader.device import Buffer
from precast.loader.driver.device import DriverDevice, LoadedKernel
from precast.loader.driver.launches import Prepared
from precast.loader.driver.param_plan import Planned
from precast.loader.weights.read_plan import Copy


class Copies:
    """The kernels of a layer that copy elements, by their bytes, and the `targets` that they make."""

    def __init__(self, what: Planned, layer: NativeLayer, device: DriverDevice) -> None:
        """Loads those that the plan takes; others of its targets, and all if the layer has none, stay on the host."""
        self._device = device
        self._bytes = {i: element_bytes(what.plan.targets[i].dtype) for i in what.on_device}
        self._kernels = _loaded({*self._bytes.values()}, Native(layer), device)
        self.targets = frozenset(i for i, size in self._bytes.items() if size in self._kernels)

    def put(self, copy: Copy, staged: int, address: int, stream: int) -> None:
        """Put what a job has staged, at an address of pinned memory, into a target, whose address this is."""
        size = self._bytes[copy.target]
        kernel, loaded = self._kernels[size]
        found = rearranged_arguments(copy.source.shape, copy.source.strides, copy.destination.strides)
        assert found is not None, "planned"
        grid, numbers = found
        values = (staged + copy.offset + size * copy.source.offset, address + size * copy.destination.offset, *numbers)
        params = [None if each.argument == NO_ARGUMENT else values[each.argument] for each in kernel.params]
        Prepared(loaded.handle, grid, (kernel.threads, 1, 1), kernel.shared_bytes, params).launch(stream)

    def room(self, num_bytes: int) -> Buffer:
        """Pinned memory."""
        return self._device.alloc(num_bytes, pinned=True)


def _loaded(
    sizes: Collection[int], native: Native, device: DriverDevice
) -> Mapping[int, tuple[NativeKernel, LoadedKernel]]:
    found = {}
    for size in sorted(sizes & REARRANGED.keys()):
        for kernel in native.of_key(rearranged_key(REARRANGED[size])[0]):
            loaded = device.load(native.image(kernel), kernel.function)
            assert isinstance(loaded, LoadedKernel)
            found[size] = kernel, loaded
    return found
