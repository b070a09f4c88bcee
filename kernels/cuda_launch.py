"""Launches kernels through the CUDA driver, those of CUDA C++ and those that Triton compiled.

The driver works in the context that torch made current on this thread. Imported when a kernel is first launched.
"""

# To pyright the bindings' modules, which are compiled, have no names.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

from cuda.bindings import driver

from precast.kernels.cuda_source import Constants, compiled

_ROOM = "precast.kernels."


@cache
def function_of(named: str, constants: Constants, device: int) -> driver.CUfunction:
    """The kernel `file:name` of CUDA C++, the file below `precast.kernels`, compiled and loaded on the current device.

    Loaded once in a process, also while a stream is captured; it may take all shared memory that the device has.
    """
    file, _, name = named.removeprefix(_ROOM).partition(":")
    code = compiled(file, constants, (_of_device(device, "COMPUTE_CAPABILITY_MAJOR"),
                                      _of_device(device, "COMPUTE_CAPABILITY_MINOR")))  # fmt: skip
    attributes = driver.CUfunction_attribute
    with relaxed_capture():
        function = checked(driver.cuModuleGetFunction(checked(driver.cuModuleLoadData(code)), name.encode()))
        fixed = checked(driver.cuFuncGetAttribute(attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function))
        most = _of_device(device, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN") - fixed
        checked(driver.cuFuncSetAttribute(function, attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, most))
        carveout = attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        checked(driver.cuFuncSetAttribute(function, carveout, 100))
    return function


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Lets this thread load a module while it captures a stream."""
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = checked(driver.cuThreadExchangeStreamCaptureMode(relaxed))
    try:
        yield
    finally:
        checked(driver.cuThreadExchangeStreamCaptureMode(before))


class At(NamedTuple):
    """An argument of a kernel that each launch is given anew: its place among those."""

    place: int


class Kernel:
    """A kernel with all that stays the same from launch to launch. One thread at a time launches it.

    `args` are its arguments in order. Integers, those of a launch too, are passed as 64 bits (`long long`, pointers),
    of which a parameter takes as many as it has; floats as float32, None as a null pointer. Each launch is given
    `num_given` arguments, whether or not all of them are among the kernel's. `pdl`: programmatic dependent launch; the
    kernel may start before the one in front of it in the stream has ended.
    """

    def __init__(
        self,
        function: driver.CUfunction,
        args: Sequence[At | int | float | None],
        *,
        num_given: int,
        num_threads: int,
        shared_bytes: int = 0,
        pdl: bool = False,
    ) -> None:
        # The driver reads all of it from this memory; a launch writes its grid and its arguments there.
        constants = [_bits(arg) for arg in args if not isinstance(arg, At)]
        self._values = (ctypes.c_uint64 * (num_given + len(constants)))(*[0] * num_given, *constants)
        behind = itertools.count(num_given)
        indices = [arg.place if isinstance(arg, At) else next(behind) for arg in args]
        first = ctypes.addressof(self._values)
        self._places = (ctypes.c_void_p * len(args))(*(first + 8 * index for index in indices))
        self._config = config = _Config(blockDim=(num_threads, 1, 1), sharedMemBytes=shared_bytes)
        if pdl:
            config.attrs, config.numAttrs = int(_pdl().getPtr()), 1
        self._function = function
        self._pack_grid = partial(struct.Struct("3I").pack_into, memoryview(config).cast("B"), 0)
        self._pack = partial(struct.Struct(f"{num_given}q").pack_into, memoryview(self._values).cast("B"), 0)
        self._call = partial(
            launch_function(), ctypes.addressof(config), int(function), ctypes.addressof(self._places), None
        )

    def launch(self, grid: Sequence[int], values: Sequence[int], stream: int = 0) -> None:
        """Launch it on a stream, captured or not, over a `grid` of 3 sizes. `values`: the arguments that are `At`."""
        self._pack_grid(*grid)
        self._pack(*values)
        self._config.hStream = stream
        if status := self._call():
            raise RuntimeError(f"the CUDA driver refuses: {driver.CUresult(status).name}")


class _Config(ctypes.Structure):
    """`CUlaunchConfig` of the driver."""

    _fields_ = (
        ("gridDim", ctypes.c_uint * 3), ("blockDim", ctypes.c_uint * 3), ("sharedMemBytes", ctypes.c_uint),
        ("hStream", ctypes.c_void_p), ("attrs", ctypes.c_void_p), ("numAttrs", ctypes.c_uint),
    )  # fmt: skip


@cache
def launch_function() -> Callable[[int, int, int, int | None], int]:
    """The driver's `cuLaunchKernelEx`: addresses of config, function and arguments in, `CUresult` out.

    `cuda.bindings` has it too, and spends several times as long on the objects around a call as the driver on a launch.
    """
    call = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    call.argtypes, call.restype = (ctypes.c_void_p,) * 4, ctypes.c_int
    return call


def _bits(arg: int | float | None) -> int:
    """An argument as the 8 bytes from which the driver takes as many as the parameter has."""
    if isinstance(arg, float):
        return int.from_bytes(struct.pack("<f", arg), "little")
    return 0 if arg is None else arg & (2**64 - 1)


@cache
def _pdl() -> driver.CUlaunchAttribute:
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def _of_device(device: int, attribute: str) -> int:
    named = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{attribute}")
    found: int = checked(driver.cuDeviceGetAttribute(named, checked(driver.cuDeviceGet(device))))
    return found


def checked(result: tuple[Any, ...]) -> Any:
    """What a call of the driver returns behind its status. Raises RuntimeError with the driver's name for a failure."""
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the CUDA driver refuses: {driver.CUresult(result[0]).name}")
    return result[1] if len(result) > 1 else None
