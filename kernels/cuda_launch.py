"""Launches kernels through the CUDA driver, those of CUDA C++ and those that Triton compiled.

The driver works in the context that torch made current on this thread. Imported when a kernel is first launched.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

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
        function = _checked(driver.cuModuleGetFunction(_checked(driver.cuModuleLoadData(code)), name.encode()))
        fixed = _checked(driver.cuFuncGetAttribute(attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function))
        most = _of_device(device, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN") - fixed
        _checked(driver.cuFuncSetAttribute(function, attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, most))
        carveout = attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        _checked(driver.cuFuncSetAttribute(function, carveout, 100))
    return function


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Lets this thread load a module while it captures a stream."""
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = _checked(driver.cuThreadExchangeStreamCaptureMode(relaxed))
    try:
        yield
    finally:
        _checked(driver.cuThreadExchangeStreamCaptureMode(before))


class Kernel:
    """A kernel with all that stays the same from launch to launch. One thread at a time launches it.

    `pdl`: programmatic dependent launch; the kernel may start before the one in front of it in the stream has ended.
    """

    def __init__(
        self,
        function: driver.CUfunction,
        num_args: int,
        *,
        num_threads: int,
        shared_bytes: int = 0,
        pdl: bool = False,
    ) -> None:
        self._function = function
        self._config = config = driver.CUlaunchConfig()
        config.blockDimX, config.blockDimY, config.blockDimZ = num_threads, 1, 1
        config.sharedMemBytes = shared_bytes
        if pdl:
            config.attrs, config.numAttrs = [_pdl()], 1
        self._values = (ctypes.c_uint64 * num_args)()
        first = ctypes.addressof(self._values)
        self._places = (ctypes.c_void_p * num_args)(*range(first, first + 8 * num_args, 8))
        self._params = ctypes.addressof(self._places)

    def launch(self, grid: Sequence[int], args: Sequence[int | float | None], stream: int = 0) -> None:
        """Launch it on a stream, captured or not, over `grid`, 1 to 3 sizes.

        `args`: integers and addresses are passed as 64 bits (`long long`, pointers), of which a parameter takes as many
        as it has; floats as float32, None as a null pointer.
        """
        config, values = self._config, self._values
        config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
        config.hStream = stream
        for i, arg in enumerate(args):
            values[i] = arg if type(arg) is int and arg >= 0 else _bits(arg)
        _checked(driver.cuLaunchKernelEx(config, self._function, self._params, 0))


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
    found: int = _checked(driver.cuDeviceGetAttribute(named, _checked(driver.cuDeviceGet(device))))
    return found


def _checked(result: tuple[Any, ...]) -> Any:
    """What a call of the driver returns behind its status. Raises RuntimeError with the driver's name for a failure."""
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the CUDA driver refuses: {driver.CUresult(result[0]).name}")
    return result[1] if len(result) > 1 else None
