"""The CUDA driver's functions, called through ctypes: numbers and addresses in, numbers out, errors by their names.

Signatures and enumerations are those of NVIDIA's `cuda.h`, of CUDA 12.0 and newer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from ctypes import POINTER, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any

from precast.ir.errors import TargetError

OUT_OF_MEMORY, NOT_READY, NOT_SUPPORTED = 2, 600, 801
STREAM_NON_BLOCKING, EVENT_WITHOUT_TIMING = 1, 2
CAPTURE_THREAD_LOCAL, CAPTURE_RELAXED = 1, 2
COMPUTE_MAJOR, COMPUTE_MINOR, MOST_SHARED_BYTES = 75, 76, 97
FUNCTION_SHARED_BYTES, FUNCTION_MOST_DYNAMIC_BYTES, FUNCTION_CARVEOUT = 1, 8, 9
ALLOCATION_PINNED, HANDLE_DESCRIPTOR, LOCATION_DEVICE, ACCESS_READ_WRITE, MEMORY_DEVICE = 1, 1, 1, 3, 2
"""Of physical memory: its type, that it can be given away as a file descriptor, where it is, who may do what."""
LAUNCH_OVERLAPS = 6
"""`CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`."""

_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetUuid_v2": (c_void_p, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuCtxSynchronize": (),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemHostGetDevicePointer_v2": (POINTER(c_uint64), c_void_p, c_uint),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemsetD8Async": (c_uint64, ctypes.c_ubyte, c_size_t, c_void_p),
    "cuMemsetD32Async": (c_uint64, c_uint, c_size_t, c_void_p),
    "cuMemcpy2DAsync_v2": (c_void_p, c_void_p),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), c_void_p, c_int),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, c_void_p, c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, c_void_p, c_size_t),
    "cuMemExportToShareableHandle": (POINTER(c_int), c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (POINTER(c_uint64), c_void_p, c_int),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuStreamWriteValue32_v2": (c_void_p, c_uint64, c_uint, c_uint),
    "cuStreamBeginCapture_v2": (c_void_p, c_int),
    "cuStreamEndCapture": (c_void_p, POINTER(c_void_p)),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuGraphInstantiateWithFlags": (POINTER(c_void_p), c_void_p, c_uint64),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuGraphExecDestroy": (c_void_p,),
    "cuGraphDestroy": (c_void_p,),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventSynchronize": (c_void_p,),
    "cuEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
    "cuEventDestroy_v2": (c_void_p,),
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleUnload": (c_void_p,),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuFuncGetAttribute": (POINTER(c_int), c_int, c_void_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuFuncLoad": (c_void_p,),
    "cuLaunchKernelEx": (c_void_p, c_void_p, c_void_p, c_void_p),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
}


class Location(ctypes.Structure):
    """`CUmemLocation`: a device by its number."""

    _fields_ = (("type", c_int), ("id", c_int))


class AllocationProperties(ctypes.Structure):
    """`CUmemAllocationProp`."""

    _fields_ = (
        ("type", c_int), ("handle_types", c_int), ("location", Location), ("win32", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )  # fmt: skip


class Access(ctypes.Structure):
    """`CUmemAccessDesc`."""

    _fields_ = (("location", Location), ("flags", c_int))


class Copy2D(ctypes.Structure):
    """`CUDA_MEMCPY2D`."""

    _fields_ = (
        ("source_x", c_size_t), ("source_y", c_size_t), ("source_type", c_int), ("source_host", c_void_p),
        ("source", c_uint64), ("source_array", c_void_p), ("source_pitch", c_size_t), ("target_x", c_size_t),
        ("target_y", c_size_t), ("target_type", c_int), ("target_host", c_void_p), ("target", c_uint64),
        ("target_array", c_void_p), ("target_pitch", c_size_t), ("width", c_size_t), ("height", c_size_t),
    )  # fmt: skip


class DriverError(RuntimeError):
    """What the driver refuses, by the status that it gives."""

    def __init__(self, status: int, called: str) -> None:
        super().__init__(f"the CUDA driver refuses {called}: {name_of(status)}")
        self.status = status


class Config(ctypes.Structure):
    """`CUlaunchConfig`."""

    _fields_ = (
        ("grid", c_uint * 3), ("block", c_uint * 3), ("shared_bytes", c_uint), ("stream", c_void_p),
        ("attributes", c_void_p), ("num_attributes", c_uint),
    )  # fmt: skip


class LaunchAttribute(ctypes.Structure):
    """`CUlaunchAttribute`, of which only an integer is used: 64 bytes from byte 8 on are the value."""

    _fields_ = (("id", c_uint), ("pad", c_uint), ("value", c_int), ("rest", ctypes.c_ubyte * 60))


@cache
def function(name: str) -> Callable[..., int]:
    """One of the driver's functions; it gives a status. Raises TargetError `device-missing` where no driver is."""
    try:
        found = getattr(_library(), name)
    except OSError as error:
        raise TargetError(
            "device-missing", f"the CUDA driver can't be loaded: {error}", fix="use device='cpu', or install the driver"
        ) from None
    except AttributeError:
        raise TargetError(
            "device-missing", f"the CUDA driver has no {name}", fix="install a driver of CUDA 12 or newer"
        ) from None
    found.argtypes, found.restype = _ARGUMENTS[name], c_int
    checked: Callable[..., int] = found
    return checked


def look_up_all() -> None:
    """Find all functions now: who asks for one while the system opens a library waits for that."""
    for name in _ARGUMENTS:
        with suppress(TargetError):
            function(name)


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *args: Any) -> None:
    """Call one of the driver's functions. Raises DriverError if it refuses."""
    if status := function(name)(*args):
        raise DriverError(status, name)


def made(name: str, kind: Any, *args: Any) -> Any:
    """What a function writes to its first argument, which has this type of ctypes. Raises DriverError."""
    found = kind()
    call(name, ctypes.byref(found), *args)
    return found.value


def name_of(status: int) -> str:
    """The driver's name for a status, such as CUDA_ERROR_OUT_OF_MEMORY."""
    text = c_char_p()
    function("cuGetErrorName")(status, ctypes.byref(text))
    return (text.value or b"status %d" % status).decode()
