"""The kernels of a native layer at hand, for one load: found by the launches that want them. No torch.

What is found nowhere is compiled, which is counted here.
"""

from __future__ import annotations

from collections.abc import Sequence

from precast.ir.native import NativeKernel, NativeLayer, takes


class Native:
    """The kernels that a load may use, and how many it had to compile beside them."""

    def __init__(self, layer: NativeLayer | None = None) -> None:
        """`layer` None: every kernel is compiled."""
        self.compilations = 0
        self._layer = layer
        self._by_key: dict[str, list[tuple[NativeKernel, tuple[int, ...]]]] = {}
        for kernel in () if layer is None else layer.kernels:
            narrow = tuple(param.argument for param in kernel.params if param.type == "int32")
            self._by_key.setdefault(kernel.key, []).append((kernel, narrow))

    def find(self, key: str, values: Sequence[int]) -> NativeKernel | None:
        """The kernel that takes a launch with this key and these arguments, those that are no integers as 0."""
        for kernel, narrow in self._by_key.get(key, ()):
            if takes(kernel.aligned, kernel.ones, narrow, values):
                return kernel
        return None

    def takes_all(self, key: str) -> bool:
        """Whether there is a kernel for launches with this key, whatever their arguments."""
        return any(not (kernel.aligned or kernel.ones or narrow) for kernel, narrow in self._by_key.get(key, ()))

    def of_key(self, key: str) -> list[NativeKernel]:
        """All kernels with this key, whatever arguments they take."""
        return [kernel for kernel, _ in self._by_key.get(key, ())]

    def image(self, kernel: NativeKernel) -> bytes:
        """The cubin that a kernel of this layer is in."""
        assert self._layer is not None, "kernels come from a layer"
        return self._layer.images[kernel.image]
