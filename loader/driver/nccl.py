"""NCCL's collectives, called through ctypes: addresses and a stream in, no torch.

Functions and enumerations are those of NVIDIA's `nccl.h`, of NCCL 2.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precast.ir.errors import TargetError
from precast.ir.graph.schema import Dtype
from precast.kernels.collectives.launches import Among

if TYPE_CHECKING:
    from precast.loader.world.descriptors import Exchange

NAME = "libnccl.so.2"
SETTINGS = {"NCCL_NVLS_ENABLE": "0"}
"""NVLink's multicast stays off."""
DTYPES: Mapping[Dtype, int] = {"int32": 2, "int64": 4, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}
"""The element types that are added up."""
_BYTES, _SUM = 1, 0
_ID_BYTES = 128


class _Id(ctypes.Structure):
    """`ncclUniqueId`."""

    _fields_ = (("data", ctypes.c_ubyte * _ID_BYTES),)


_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetUniqueId": (POINTER(_Id),),
    "ncclCommInitRank": (POINTER(c_void_p), c_int, _Id, c_int),
    "ncclCommDestroy": (c_void_p,),
    "ncclCommAbort": (c_void_p,),
    "ncclAllReduce": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclAllGather": (c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p),
}


class Nccl:
    """The ranks of a world, over NCCL, on the device that is current when it is made."""

    def __init__(self, among: Among, exchange: Exchange) -> None:
        """All ranks call it. Raises TargetError `dependency-missing` where the library is on none of them, or not on
        all; RuntimeError with NCCL's words where ranks can't connect."""
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        problem, unique, library = "", _Id(), None
        try:
            library = _library()
            if among.rank == 0:
                _check(library.ncclGetUniqueId(byref(unique)), "ncclGetUniqueId")
        except (OSError, RuntimeError) as error:
            problem = f"rank {among.rank}: {error}"
        problems = [each.decode() for each in exchange("nccl/library", problem.encode()) if each]
        if problems:
            fix = "pip install nvidia-nccl-cu13 (or -cu12) on all ranks, or load with backend='torch'"
            raise TargetError("dependency-missing", f"NCCL can't be loaded: {'; '.join(problems)}", fix=fix)
        assert library is not None, "it is loaded on all ranks"
        unique = _Id.from_buffer_copy(exchange("nccl/id", bytes(unique))[0])
        self._communicator = c_void_p()
        _check(library.ncclCommInitRank(byref(self._communicator), among.size, unique, among.rank), "ncclCommInitRank")

    def all_reduce(self, out: int, x: int, count: int, dtype: int, *, stream: int) -> None:
        """The sum of all ranks' `count` elements, of one of `DTYPES`, from address `x` to `out`."""
        status = _library().ncclAllReduce(x, out, count, dtype, _SUM, self._communicator, stream)
        _check(status, "ncclAllReduce")

    def all_gather(self, out: int, x: int, num_bytes: int, *, stream: int) -> None:
        """All ranks' bytes from address `x`, one after another, at `out`."""
        _check(_library().ncclAllGather(x, out, num_bytes, _BYTES, self._communicator, stream), "ncclAllGather")

    def abort(self) -> None:
        """End, from another thread, what this rank waits for in others that are gone."""
        communicator, self._communicator = self._communicator, c_void_p()
        if communicator:
            _library().ncclCommAbort(communicator)

    def close(self) -> None:
        """Let go of the other ranks, once this rank's collectives have ended."""
        communicator, self._communicator = self._communicator, c_void_p()
        if communicator:
            _library().ncclCommDestroy(communicator)


def is_installed() -> bool:
    """Whether the library is there."""
    try:
        _library()
    except OSError:
        return False
    return True


@cache
def _library() -> Any:
    """The library. Raises OSError where it is not installed, or lacks a function."""
    for path in _installed():
        with suppress(OSError):
            found = ctypes.CDLL(path)
            for name, arguments in _ARGUMENTS.items():
                try:
                    getattr(found, name).argtypes = arguments
                except AttributeError:
                    raise OSError(f"{path} has no {name}: it is no NCCL 2") from None
            found.ncclGetErrorString.restype = c_char_p
            return found
    raise OSError(f"{NAME} is not installed; pip install nvidia-nccl-cu13 brings it")


def _installed() -> Iterator[str]:
    """Where it may be: in NVIDIA's package, or anywhere that the system's loader looks."""
    package = find_spec("nvidia")
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        yield from sorted(glob(str(Path(folder) / "nccl" / "lib" / NAME)))
    yield NAME


def _check(status: int, called: str) -> None:
    if status:
        raise RuntimeError(f"NCCL refuses {called}: {_library().ncclGetErrorString(status).decode()}")
