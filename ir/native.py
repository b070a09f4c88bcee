"""The native layer: what a bundle's kernels were compiled to for one target. Code, unlike all else in a bundle.

A layer is a table of kernels and the images (cubins) that hold them. It says nothing about grids or tensors: a loader
makes those from the graph, as it does without a layer, and then looks here for the kernel before it compiles one.

Every struct is wire format, as in `precast.ir.graph.schema`. Nothing here knows which kernels there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from precast.ir.graph.schema import Wire

ParamType = Literal["pointer", "int32", "int64", "float32"]
"""What a kernel takes in one place: 8, 4, 8 or 4 bytes."""

NO_ARGUMENT = -1
"""In the place of an argument: a null pointer. Triton's kernels end with two, for memory of their own."""

SHARED_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "sm_80": 163 << 10, "sm_86": 99 << 10, "sm_87": 163 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10,
        "sm_100": 227 << 10, "sm_103": 227 << 10, "sm_120": 99 << 10, "sm_121": 99 << 10,
    }
)  # fmt: skip
"""The targets that a layer may be for, and the shared memory that a block has there at most (CUDA C++ Programming
Guide, Compute Capabilities)."""


class NativeParam(Wire, frozen=True):
    """A parameter of a compiled kernel: its type, and which of the launch's arguments it is (`NO_ARGUMENT`: null).

    Arguments that were compiled in (None, constants, those in `NativeKernel.ones`) have no parameter.
    """

    type: ParamType
    argument: int


class NativeKernel(Wire, frozen=True):
    """One compiled kernel, and for which launches it is.

    `kernel` is its name in our sources, as launches have it: `module:function` of Triton's, `file:name` of CUDA C++.
    `key` is the digest of all that is known of a launch before it runs: that name, constants, warps, the types of its
    arguments (`precast.kernels.launch_key`). Several kernels may share a key: the first takes a launch whose arguments
    fulfil its conditions. `aligned` are arguments that must be multiples of 16 (addresses in bytes), `ones` those
    that must be 1; an argument of type `int32` must lie below 2^31.

    `function` is its name in the image with digest `image`. It is launched with `threads` a block and `shared_bytes`
    of dynamic shared memory; `pdl`: by programmatic dependent launch. `params` in the order of the kernel's.
    """

    kernel: str
    key: str
    image: str
    function: str
    threads: int
    shared_bytes: int
    params: tuple[NativeParam, ...]
    aligned: tuple[int, ...] = ()
    ones: tuple[int, ...] = ()
    pdl: bool = False


class NativeLayer(Wire, frozen=True):
    """The kernels for a target (`sm_90`), by `kernel`, `key`, and within a key the one with most conditions first.

    `compilers`: the versions that made them, by name. `sources`: the modules and files of `precast.kernels` that they
    are made from, with the SHA-256 of each: a Precast with others can't tell what the kernels do. `driver`: the least
    version of CUDA that a driver must have to load them, as `cuDriverGetVersion` counts (12040 is 12.4).
    `images`: cubins by their SHA-256, in hexadecimal.
    """

    target: str
    driver: int
    compilers: dict[str, str]
    sources: dict[str, str]
    kernels: tuple[NativeKernel, ...]
    images: dict[str, bytes]
