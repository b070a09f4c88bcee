"""One launch of a record on a GPU: what it names is compiled when it is first run, and launched through the driver; or
by a library.

Imported when a kernel is first launched.
"""

# To pyright the bindings' modules, which are compiled, have no names.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from cuda.bindings import driver

from precast.kernels.cuda_launch import Kernel, function_of, relaxed_capture
from precast.kernels.named import named
from precast.kernels.records import Launch

Run = Callable[[Sequence[int], Sequence[Any]], None]
"""Launches a kernel over a grid with these arguments: tensors for pointers, None for those that aren't given."""


def run_of(launch: Launch) -> Run:
    """What runs the launch, on the current device and stream."""
    if launch.library:
        return _library(launch)
    return _cuda(launch) if launch.block else _triton(launch)


def _cuda(launch: Launch) -> Run:
    kernels: dict[int, Kernel] = {}  # by device

    def run(grid: Sequence[int], args: Sequence[Any]) -> None:
        device = torch.cuda.current_device()
        if device not in kernels:
            function = function_of(launch.kernel, tuple(launch.constants.items()), device)
            kernels[device] = Kernel(
                function, len(args), num_threads=launch.block, shared_bytes=launch.shared_bytes, pdl=launch.pdl
            )
        kernels[device].launch(grid, [_value(arg) for arg in args], torch.cuda.current_stream().cuda_stream)

    return run


def _library(launch: Launch) -> Run:
    calls: dict[int, Callable[..., None]] = {}  # by device
    seen: set[tuple[Any, ...]] = set()

    def run(grid: Sequence[int], args: Sequence[Any]) -> None:
        device, stream = torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream
        values = [_value(arg) for arg in args]
        sizes = (device, *(arg for arg in args if not isinstance(arg, torch.Tensor)))
        if sizes in seen:
            calls[device](*values, stream=stream)
            return
        with relaxed_capture():  # what it makes, and the modules that the library loads
            if device not in calls:
                calls[device] = named(launch.kernel)(**launch.constants)
            calls[device](*values, stream=stream)
        seen.add(sizes)

    return run


class _Compiled(NamedTuple):
    """A kernel of Triton's for arguments of some kind, and which of them it takes: others became constants."""

    kernel: Kernel
    takes: tuple[int, ...]


def _triton(launch: Launch) -> Run:
    compiled: dict[tuple[int, ...], _Compiled] = {}

    def run(grid: Sequence[int], args: Sequence[Any]) -> None:
        values = [_value(arg) for arg in args]
        key = (torch.cuda.current_device(), *map(_kind, values))
        if key not in compiled:
            compiled[key] = _compiled(launch, args)
        kernel, takes = compiled[key]
        kernel.launch(grid, [values[i] for i in takes], torch.cuda.current_stream().cuda_stream)

    return run


def _value(arg: Any) -> Any:
    return arg.data_ptr() if isinstance(arg, torch.Tensor) else arg


def _kind(value: Any) -> int:
    """What Triton compiles kernels apart for: None and 1 as constants, multiples of 16, integers of 64 bits."""
    if type(value) is not int:
        return -1 if value is None else 0
    return 1 if value == 1 else (value & 15 == 0) << 1 | (value >= 2**31) << 2


def _compiled(launch: Launch, args: Sequence[Any]) -> _Compiled:
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "launch_pdl": launch.pdl}
    with relaxed_capture():
        made = named(launch.kernel).warmup(*args, grid=(1,), **launch.constants, **options)
        made._init_handles()
    assert not made.metadata.global_scratch_size, f"{launch.kernel} wants memory of its own"
    takes = tuple(
        i for i, kind in zip(range(len(args)), made.src.signature.values(), strict=False) if kind != "constexpr"
    )
    # Behind the arguments, Triton's kernels take two pointers for memory of their own: none here.
    kernel = Kernel(
        driver.CUfunction(made.function), len(takes) + 2, num_threads=32 * made.metadata.num_warps,
        shared_bytes=made.metadata.shared, pdl=launch.pdl,
    )  # fmt: skip
    return _Compiled(kernel, takes)
