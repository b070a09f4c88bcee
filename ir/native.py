"""The native layer: what a bundle's kernels were compiled to for one target. Code, unlike all else in a bundle.

A layer is a table of kernels and the images (cubins) that hold them. It says nothing about grids or tensors: a loader
makes those from the graph, as it does without a layer, and then looks here for the kernel before it compiles one.

Every struct is wire format, as in `precast.ir.graph.schema`. Nothing here knows which kernels there are.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from precast.ir import limits
from precast.ir.errors import BundleError, shown, some
from precast.ir.graph.schema import Wire

ParamType = Literal["pointer", "int32", "int64", "float32"]
"""What a kernel takes in one place: 8, 4, 8 or 4 bytes."""

ALIGNED = 16
"""Of what Triton compiles kernels apart for: multiples of so many bytes or elements."""
MOST_INT32 = 2**31 - 1
"""Of an integer argument; a larger one takes a kernel with 64 bits in its place."""
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
    `images`: cubins by their SHA-256, in hexadecimal. `worlds`: for which numbers of ranks that share a layer, and of
    parts of the experts, it has what every rank launches; none: for one rank alone.
    """

    target: str
    driver: int
    compilers: dict[str, str]
    sources: dict[str, str]
    kernels: tuple[NativeKernel, ...]
    images: dict[str, bytes]
    worlds: tuple[tuple[int, int], ...] = ()

    def covers(self, tp: int, ep: int) -> bool:
        """Whether it has what the ranks of this world launch."""
        return (tp, ep) in (self.worlds or ((1, 1),))

    @property
    def worlds_text(self) -> str:
        """The worlds that it is for, as options name them: `tp=1`, or `tp=2 and tp=4,ep=2`."""
        return " and ".join(world_text(tp, ep) for tp, ep in self.worlds or ((1, 1),))


def world_text(tp: int, ep: int) -> str:
    """The world as options name it."""
    return f"tp={tp}" if ep == 1 else f"tp={tp},ep={ep}"


def takes(aligned: Sequence[int], ones: Sequence[int], narrow: Sequence[int], values: Sequence[int]) -> bool:
    """Whether a kernel takes a launch of these values, an integer for each argument: those of `aligned` are multiples
    of 16, those of `ones` are 1, and those of `narrow` have 31 bits."""
    return (
        all(values[i] % ALIGNED == 0 for i in aligned)
        and all(values[i] == 1 for i in ones)
        and all(values[i] <= MOST_INT32 for i in narrow)
    )


_KERNEL = re.compile(r"precast\.kernels(\.[a-z_0-9]+)+(/[a-z_0-9]+\.cu)?:[A-Za-z_][A-Za-z_0-9]*")
_FUNCTION = re.compile(r"[A-Za-z_$][A-Za-z_0-9$]*")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ELF = b"\x7fELF"
_MOST_THREADS = 1024
"""Of a block, on all GPUs."""


def check(layer: NativeLayer) -> None:
    """Raise BundleError (`native-invalid`, `limit-exceeded`) with all that is wrong with a layer."""
    for what, found, limit in (
        ("kernels", len(layer.kernels), limits.MAX_KERNELS),
        ("images", len(layer.images), limits.MAX_KERNELS),
        ("sources", len(layer.sources), limits.MAX_KERNELS),
        ("worlds", len(layer.worlds), limits.MAX_KERNELS),
    ):
        if found > limit:
            raise BundleError("limit-exceeded", f"native: {found} {what}; at most {limit} are allowed")
    problems = [*_problems(layer), *(each for kernel in layer.kernels for each in _kernel_problems(layer, kernel))]
    if problems:
        listed = "; ".join(some(problems))
        raise BundleError("native-invalid", f"native layer for {shown(layer.target)}: {listed}")


def _problems(layer: NativeLayer) -> Iterator[str]:
    if layer.target not in SHARED_BYTES:
        yield f"the target is none of {', '.join(SHARED_BYTES)}"
    if not 0 < layer.driver < 1_000_000:
        yield f"driver is {layer.driver}, which is no version of CUDA"
    for name, digest in layer.sources.items():
        if not _DIGEST.fullmatch(digest):
            yield f"source {shown(name)} has no digest"
    for digest, image in layer.images.items():
        if hashlib.sha256(image).hexdigest() != digest:
            yield f"image {shown(digest)} has another content than its digest says"
        elif not image.startswith(_ELF):
            yield f"image {digest} is no cubin"
    if list(layer.worlds) != sorted({*layer.worlds}) or layer.worlds == ((1, 1),):
        yield "the worlds are not in their order, each once; that of one rank alone is not listed"
    if any(tp < 1 or ep < 1 or tp % ep for tp, ep in layer.worlds):
        yield "a world has no ranks, or parts of the experts that don't divide them"
    unused = sorted(layer.images.keys() - {kernel.image for kernel in layer.kernels})
    if unused:
        yield f"no kernel is in image {', '.join(some(unused))}"
    order = [_place(kernel) for kernel in layer.kernels]
    if order != sorted(order):
        yield "the kernels are not in their order"


def _place(kernel: NativeKernel) -> tuple[str, str, int]:
    return kernel.kernel, kernel.key, -len(kernel.aligned) - len(kernel.ones)


def _kernel_problems(layer: NativeLayer, kernel: NativeKernel) -> Iterator[str]:
    name = shown(kernel.kernel)
    if not _KERNEL.fullmatch(kernel.kernel) or kernel.kernel.partition(":")[0] not in layer.sources:
        yield f"{name} is no kernel of the sources that are listed"
    if not _DIGEST.fullmatch(kernel.key):
        yield f"{name}: its key is no digest"
    if kernel.image not in layer.images:
        yield f"{name}: there is no image {shown(kernel.image)}"
    if not _FUNCTION.fullmatch(kernel.function):
        yield f"{name}: {shown(repr(kernel.function))} is no function of an image"
    if not (32 <= kernel.threads <= _MOST_THREADS and kernel.threads % 32 == 0):
        yield f"{name}: {kernel.threads} threads, expected whole warps, up to {_MOST_THREADS}"
    most = SHARED_BYTES.get(layer.target, 0)
    if not 0 <= kernel.shared_bytes <= most:
        yield f"{name}: {kernel.shared_bytes} bytes of shared memory, and {layer.target} has {most} for a block"
    if len(kernel.params) > limits.MAX_KERNEL_PARAMS:
        yield f"{name}: {len(kernel.params)} parameters; at most {limits.MAX_KERNEL_PARAMS} are allowed"
    given = [param.argument for param in kernel.params if param.argument != NO_ARGUMENT]
    if any(param.argument == NO_ARGUMENT and param.type != "pointer" for param in kernel.params):
        yield f"{name}: a number that is no argument"
    places = [*given, *kernel.aligned, *kernel.ones]
    if any(not 0 <= place < limits.MAX_KERNEL_PARAMS for place in places) or len(set(given)) != len(given):
        yield f"{name}: parameters or conditions of arguments that there are not"
    if list(kernel.aligned) != sorted({*kernel.aligned}) or list(kernel.ones) != sorted({*kernel.ones}):
        yield f"{name}: conditions that are not in their order"
    if {*kernel.ones} & {*given}:
        yield f"{name}: an argument that is 1 has a parameter"
