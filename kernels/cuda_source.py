"""CUDA C++ of this room to machine code, by NVRTC: it takes neither nvcc nor CUDA's headers, and no GPU."""

# To pyright the bindings' modules, which are compiled, have no names.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precast.ir.errors import TargetError

if TYPE_CHECKING:
    from cuda.bindings import nvrtc

Constants = tuple[tuple[str, int | float | bool | str], ...]
"""Macros by name: True defines the name alone, False leaves it undefined, others give it a value."""
_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)


def is_installed() -> bool:
    """Whether the bindings are there through which CUDA C++ is compiled and launched."""
    return find_spec("cuda") is not None and find_spec("cuda.bindings") is not None


def nvrtc_version() -> str:
    """Of the compiler: `13.0`. Raises TargetError `dependency-missing` as `compiled` does."""
    return "{}.{}".format(*_checked(_nvrtc().nvrtcVersion()))


@cache
def compiled(file: str, constants: Constants, capability: tuple[int, int]) -> bytes:
    """The cubin of a file below `precast.kernels` for a compute capability: compiled once in a process.

    Equal sources and constants give equal bytes. Compute capability 9.0 is compiled as sm_90a, with all that Hopper
    has. Raises TargetError `dependency-missing` where the bindings or NVRTC are missing.
    """
    source = _text(file)
    headers = {name: _text(name) for name in included(source)}
    options = (_architecture(capability), "--std=c++17", *_defines(constants))
    return _compile(source, Path(file).name, headers, options)


def included(source: str) -> list[str]:
    """The headers that a source includes: files below `precast.kernels`, which include nothing themselves."""
    return _INCLUDE.findall(source)


def _text(file: str) -> str:
    return (Path(__file__).parent / file).read_text(encoding="utf-8")


def _architecture(capability: tuple[int, int]) -> str:
    return "--gpu-architecture=sm_{}{}".format(*capability) + ("a" if capability == (9, 0) else "")


def _defines(constants: Constants) -> Iterator[str]:
    for name, value in sorted(constants):
        if value is not False:
            yield f"-D{name}" if value is True else f"-D{name}={value}"


def _compile(source: str, name: str, headers: Mapping[str, str], options: tuple[str, ...]) -> bytes:
    nvrtc = _nvrtc()
    texts, names = [text.encode() for text in headers.values()], [each.encode() for each in headers]
    (program,) = _checked(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), len(names), texts, names))
    try:
        found = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        assert found[0] == nvrtc.nvrtcResult.NVRTC_SUCCESS, f"{name} {options}: {_log(nvrtc, program)}"
        (size,) = _checked(nvrtc.nvrtcGetCUBINSize(program))
        cubin = bytearray(size)
        _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
        return bytes(cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _nvrtc() -> nvrtc:
    """The bindings, once the library behind them is loaded."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # loads the library
    except (ImportError, RuntimeError) as error:
        raise TargetError(
            "dependency-missing",
            f"CUDA C++ can't be compiled here: {error}",
            fix="pip install cuda-bindings nvidia-cuda-nvrtc, which come with PyTorch's builds for CUDA",
        ) from error
    return nvrtc


def _checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a call of NVRTC returns behind its status, which must be success."""
    assert int(result[0]) == 0, f"NVRTC: {result[0]}"
    return result[1:]


def _log(nvrtc: Any, program: Any) -> str:
    (size,) = _checked(nvrtc.nvrtcGetProgramLogSize(program))
    log = bytearray(size)
    _checked(nvrtc.nvrtcGetProgramLog(program, log))
    return log.rstrip(b"\0").decode(errors="replace")
