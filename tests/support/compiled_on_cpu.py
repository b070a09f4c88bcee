"""Compiles C++ for this CPU: the sources of kernels, as tests run them here."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

_TESTS = Path(__file__).parents[1]
_FLAGS = ("-std=c++20", "-Og", "-fPIC", "-Wno-unknown-pragmas")
_HEADERS = (
    "algorithm", "cmath", "cstddef", "cstdio", "cstdlib", "cstring", "functional", "map", "memory", "random", "set",
    "sys/mman.h", "ucontext.h", "utility", "vector",
)  # fmt: skip
"""What the programs include, which would be most of what is compiled: it is compiled once for all of them."""


def compiled(program: str, made: Path, *flags: str) -> Path:
    """`made`, of `program` in `tests/kernels`, which includes files beside `made`, too."""
    command = [_compiler(), *_FLAGS, "-include", _headers(), f"-I{made.parent}", *flags]
    subprocess.run([*command, _TESTS / "kernels" / program, "-o", made], check=True)
    return made


def _compiler() -> str:
    found = shutil.which("g++")
    if found is None:
        pytest.skip("needs g++ to compile the kernel's source for this CPU")
    return found


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """There until this process ends."""
    return tempfile.TemporaryDirectory()


@cache
def _headers() -> Path:
    """A compiler takes what it has made of the header, which lies beside it, where the flags are the same."""
    header = Path(_folder().name) / "headers.h"
    header.write_text("".join(f"#include <{each}>\n" for each in _HEADERS), encoding="utf-8")
    made = header.with_name("headers.h.gch")
    subprocess.run([_compiler(), *_FLAGS, "-x", "c++-header", header, "-o", made], check=True)
    return header
