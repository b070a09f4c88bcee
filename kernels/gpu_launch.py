"""One launch of a record on a GPU: what it names is compiled when it is first run, and launched through the driver; or
by a library.

Imported when a kernel is first launched.
"""

# To pyright the bindings' modules, which are compiled, have no names.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from cuda.bindings import driver

from precast.ir.graph.schema import Apply, Expr
from precast.ir.native import NO_ARGUMENT
from precast.kernels.cuda_launch import MUCH_SHARED_BYTES, At, Kernel, function_in, function_of, relaxed_capture
from precast.kernels.named import named
from precast.kernels.native import Native
from precast.kernels.records import Launch, Pointer, Stride

Tensors = Mapping[str, torch.Tensor]
Run = Callable[[Tensors, Sequence[int]], None]
"""Launches a kernel with these tensors, by the names that launches give them, and these sizes."""
ReadArgs = Callable[[Tensors, Sequence[int]], Sequence[Any]]
"""The arguments of a launch as Triton compiles for them."""

_MANY = 4096
"""Of how many different arguments it is remembered which of Triton's kernels takes them."""


class Lookup(NamedTuple):
    """Where compiled kernels of a launch are looked up, and by what key."""

    native: Native
    key: str


def run_of(launch: Launch, places: Mapping[Expr, int], read_args: ReadArgs, device: int, lookup: Lookup) -> Run:
    """What runs the launch on a device, which is the current one, on its current stream.

    `places` says where the values of expressions stand among a run's sizes.
    """
    given = _Given(launch, places)
    if launch.library:
        return _library(launch, given, device)
    kernels = _Kernels(launch, given, device, lookup)
    kernel_for = _cuda(kernels) if launch.block else _Triton(kernels, read_args).kernel_for

    def run(tensors: Tensors, sizes: Sequence[int]) -> None:
        grid = given.grid(sizes)
        if 0 not in grid:
            addresses, numbers = given.addresses(tensors, sizes), given.numbers(tensors, sizes)
            kernel = kernel_for(addresses, numbers, tensors, sizes)
            kernel.launch(grid, addresses + numbers, _current_stream(device))

    return run


def _current_stream(device: int) -> int:
    """What `torch.cuda.current_stream` makes an object of."""
    return torch._C._cuda_getCurrentRawStream(device)


class _Given:
    """What changes from one run of a launch to the next: its grid, addresses, and numbers, which are strides and sizes.

    `args` says of each argument of the kernel where it stands among addresses and numbers, or that it is a constant.
    """

    def __init__(self, launch: Launch, places: Mapping[Expr, int]) -> None:
        pointers = [arg for arg in launch.args if isinstance(arg, Pointer)]
        strides = [arg for arg in launch.args if isinstance(arg, Stride)]
        sizes = [arg for arg in launch.args if isinstance(arg, (str, Apply))]
        indices = {arg: At(i) for i, arg in enumerate(dict.fromkeys((*pointers, *strides, *sizes)))}
        self.num_given = len(indices)
        self.args = [indices[arg] if isinstance(arg, (Pointer, Stride, str, Apply)) else arg for arg in launch.args]
        pointers, strides = list(dict.fromkeys(pointers)), list(dict.fromkeys(strides))
        self._names = [each.tensor for each in pointers]
        self._offsets = [(i, _place(each.offset, places)) for i, each in enumerate(pointers) if each.offset != 0]
        self._strides = [(each.tensor, each.axis) for each in strides]
        self._sizes = [places[each] for each in dict.fromkeys(sizes)]
        self._grid = [_place(size, places) for size in (*launch.grid, 1, 1)[:3]]

    def grid(self, sizes: Sequence[int]) -> list[int]:
        """Three sizes."""
        return [number if place is None else sizes[place] for place, number in self._grid]

    def addresses(self, tensors: Tensors, sizes: Sequence[int]) -> list[int]:
        """Of the tensors."""
        found = [tensors[name].data_ptr() for name in self._names]
        for i, (place, number) in self._offsets:
            found[i] += number if place is None else sizes[place]
        return found

    def numbers(self, tensors: Tensors, sizes: Sequence[int]) -> list[int]:
        """The strides, and then the sizes."""
        found = [sizes[place] for place in self._sizes]
        return [tensors[name].stride(axis) for name, axis in self._strides] + found if self._strides else found


def _place(expr: Expr, places: Mapping[Expr, int]) -> tuple[int | None, int]:
    """Where the value stands among a run's sizes, or the value if it is a constant."""
    return (None, expr) if isinstance(expr, int) else (places[expr], 0)


KernelFor = Callable[[list[int], list[int], Tensors, Sequence[int]], Kernel]


class _Kernels(NamedTuple):
    """What finds or compiles a kernel of a launch."""

    launch: Launch
    given: _Given
    device: int
    lookup: Lookup

    def found(self, values: Sequence[int]) -> Kernel | None:
        """The layer's kernel for a run of these addresses and numbers; None, which is counted, if it has none."""
        native, given = self.lookup.native, self.given
        numbers = [values[arg.place] if isinstance(arg, At) else arg for arg in given.args]
        kernel = native.find(self.lookup.key, [each if isinstance(each, int) else 0 for each in numbers])
        if kernel is None:
            native.compilations += 1
            return None
        is_cuda = self.launch.block > 0
        function = function_in(
            native.image(kernel), kernel.function, self.device,
            wants_shared=is_cuda or kernel.shared_bytes > MUCH_SHARED_BYTES,
        )  # fmt: skip
        takes = [None if param.argument == NO_ARGUMENT else given.args[param.argument] for param in kernel.params]
        return Kernel(
            function, takes, num_given=given.num_given, num_threads=kernel.threads, shared_bytes=kernel.shared_bytes,
            pdl=kernel.pdl,
        )  # fmt: skip


def _cuda(kernels: _Kernels) -> KernelFor:
    made: list[Kernel] = []

    def kernel_for(addresses: list[int], numbers: list[int], *_: object) -> Kernel:
        if not made:
            made.append(kernels.found(addresses + numbers) or _of_cuda(kernels))
        return made[0]

    return kernel_for


def _of_cuda(kernels: _Kernels) -> Kernel:
    launch, given = kernels.launch, kernels.given
    function = function_of(launch.kernel, tuple(launch.constants.items()), kernels.device)
    return Kernel(
        function, given.args, num_given=given.num_given, num_threads=launch.block, shared_bytes=launch.shared_bytes,
        pdl=launch.pdl,
    )  # fmt: skip


def _library(launch: Launch, given: _Given, device: int) -> Run:
    calls: list[Callable[..., None]] = []
    seen: set[tuple[int, ...]] = set()

    def run(tensors: Tensors, sizes: Sequence[int]) -> None:
        if 0 in given.grid(sizes):
            return
        numbers = given.numbers(tensors, sizes)
        values = given.addresses(tensors, sizes) + numbers
        args = [values[arg.place] if isinstance(arg, At) else arg for arg in given.args]
        key = tuple(numbers)
        if key in seen:
            calls[0](*args, stream=_current_stream(device))
            return
        with relaxed_capture():  # what it makes, and the modules that the library loads
            if not calls:
                calls.append(named(launch.kernel)(**launch.constants))
            calls[0](*args, stream=_current_stream(device))
        seen.add(key)

    return run


class _Triton:
    """The kernels of a launch that Triton compiled, ahead or when they were first wanted."""

    def __init__(self, kernels: _Kernels, read_args: ReadArgs) -> None:
        self._kernels, self._read_args = kernels, read_args
        self._by_kinds: dict[tuple[int, ...], Kernel] = {}
        self._by_values: dict[tuple[int, ...], Kernel] = {}

    def kernel_for(self, addresses: list[int], numbers: list[int], tensors: Tensors, sizes: Sequence[int]) -> Kernel:
        """The one for these arguments, found or compiled where they are the first of their kinds."""
        bits = 0
        for address in addresses:
            bits |= address
        # Addresses are nearly always multiples of 16; of what they are besides, kernels know nothing.
        key = (*numbers, *(address & 15 for address in addresses)) if bits & 15 else tuple(numbers)
        kernel = self._by_values.get(key)
        if kernel is None:
            kinds = tuple(map(_kind, addresses + numbers))
            if kinds not in self._by_kinds:
                self._by_kinds[kinds] = self._kernels.found(addresses + numbers) or _compiled(
                    self._kernels.launch, self._kernels.given, self._read_args(tensors, sizes)
                )
            if len(self._by_values) >= _MANY:
                self._by_values.clear()
            kernel = self._by_values[key] = self._by_kinds[kinds]
        return kernel


def _kind(value: int) -> int:
    """What Triton compiles kernels apart for: 1 as a constant, multiples of 16, integers of 64 bits."""
    return 1 if value == 1 else (value & 15 == 0) << 1 | (value >= 2**31) << 2


def _compiled(launch: Launch, given: _Given, args: Sequence[Any]) -> Kernel:
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "launch_pdl": launch.pdl}
    with relaxed_capture():
        made = named(launch.kernel).warmup(*args, grid=(1,), **launch.constants, **options)
        made._init_handles()
    assert not made.metadata.global_scratch_size, f"{launch.kernel} wants memory of its own"
    # Others became constants.
    takes = [arg for arg, kind in zip(given.args, made.src.signature.values(), strict=False) if kind != "constexpr"]
    # Behind the arguments, Triton's kernels take two pointers for memory of their own: none here.
    return Kernel(
        driver.CUfunction(made.function), [*takes, None, None], num_given=given.num_given,
        num_threads=32 * made.metadata.num_warps, shared_bytes=made.metadata.shared, pdl=launch.pdl,
    )  # fmt: skip
