"""What launches run: kernels of a bundle's native layer, loaded when first wanted, and cuBLASLt's products."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from precast.ir.errors import TargetError
from precast.ir.native import NO_ARGUMENT, NativeKernel, NativeLayer
from precast.kernels.named import named
from precast.kernels.native import Native
from precast.kernels.records import Launch
from precast.loader.driver import library
from precast.loader.driver.device import DriverDevice, LoadedKernel, relaxed_capture
from precast.loader.driver.launches import Prepared
from precast.loader.driver.placed import Number
from precast.loader.driver.program import Ready

Run = Callable[[int], None]
"""Launches something on a stream, captured or not."""

_MUCH_SHARED_BYTES = 48 << 10
"""Of shared memory; kernels that take more want as much of the cache for it as there is."""


class Kernels:
    """What launches run, on one device."""

    def __init__(
        self, native: Native, device: DriverDevice, calls: Mapping[str, Callable[..., None]] | None = None
    ) -> None:
        """`calls`: what connects ranks, by the names that launches have it by."""
        self.native = native
        self._device, self._calls = device, dict(calls or {})
        self._is_stopped = False
        self._loaded: dict[tuple[str, str], LoadedKernel] = {}
        self._products: dict[tuple[str, tuple[tuple[str, object], ...]], Callable[..., None]] = {}

    def prepared(self, ready: Ready) -> Run:
        """What runs a launch. Raises TargetError `kernel-missing` where the layer has no kernel for it."""
        launch = ready.launch
        if launch.library:
            return partial(_call, self._calls.get(launch.kernel) or self._product(launch), ready.values)
        kernel = self._kernel_for(ready)
        values = [None if each.argument == NO_ARGUMENT else ready.values[each.argument] for each in kernel.params]
        return Prepared(
            self._function(kernel), ready.grid, (kernel.threads, 1, 1), kernel.shared_bytes, values, pdl=kernel.pdl
        ).launch  # fmt: skip

    def load_all(self, layer: NativeLayer) -> None:
        """Load all kernels of the layer, before it is known which launches take them, until `stop`. Nothing else is
        asked of this object meanwhile."""
        with self._device.use():
            for kernel in layer.kernels:
                if self._is_stopped:
                    return
                self._function(kernel)

    def stop(self) -> None:
        """Let `load_all` end, in another thread, after the kernel that it is at."""
        self._is_stopped = True

    def load(self, launches: Iterable[tuple[Launch, str]]) -> None:
        """Load whatever kernels these launches, each with its key, may take, and make the library's products."""
        for launch, key in launches:
            if launch.library:
                if launch.kernel not in self._calls:
                    self._product(launch)
            else:
                for kernel in self.native.of_key(key):
                    self._function(kernel)

    def _kernel_for(self, ready: Ready) -> NativeKernel:
        numbers = [value if isinstance(value, int) else 0 for value in ready.values]
        kernel = self.native.find(ready.key, numbers)
        if kernel is not None:
            return kernel
        raise TargetError(
            "kernel-missing",
            f"the native layer has no kernel {ready.launch.kernel} for these arguments: {ready.values}",
            fix="load the bundle with backend='torch', and report the message",
        )

    def _function(self, kernel: NativeKernel) -> int:
        name = kernel.image, kernel.function
        if name not in self._loaded:
            loaded = self._device.load(self.native.image(kernel), kernel.function)
            assert isinstance(loaded, LoadedKernel)
            if ".cu:" in kernel.kernel or kernel.shared_bytes > _MUCH_SHARED_BYTES:
                library.call("cuFuncSetAttribute", loaded.handle, library.FUNCTION_CARVEOUT, 100)
            self._loaded[name] = loaded
        return self._loaded[name].handle

    def _product(self, launch: Launch) -> Callable[..., None]:
        """A product of cuBLASLt's; those of equal sizes are one."""
        key = launch.kernel, tuple(launch.constants.items())
        if key not in self._products:
            with relaxed_capture():
                self._products[key] = named(launch.kernel)(**launch.constants)
        return self._products[key]


def missing(launches: Iterable[tuple[Launch, str]], layer: NativeLayer) -> list[str]:
    """The kernels of launches, each with its key, that a layer has for no arguments at all."""
    held = {kernel.key for kernel in layer.kernels}
    return sorted({launch.kernel for launch, key in launches if not launch.library and key not in held})


def _call(product: Callable[..., None], values: tuple[Number, ...], stream: int) -> None:
    """Multiply. What a product makes when it first sees a size may be made while a stream is captured."""
    with relaxed_capture():
        product(*values, stream=stream)
