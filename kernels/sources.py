"""The digest of an implementation's source files: what was measured or compiled is valid while it stays the same."""

from __future__ import annotations

import ast
import hashlib
import re
from functools import cache, partial
from pathlib import Path

from precast.kernels.cuda_source import included
from precast.kernels.records import Launches, Record

_ROOM = "precast.kernels"
_CUDA = (".cu", ".cuh")
_NAME = re.compile(r"precast\.kernels(\.[a-z_0-9]+)+|precast\.kernels(\.[a-z_0-9]+)?/[a-z_0-9]+\.cuh?")


def digest(record: Record) -> str:
    """SHA-256 of an implementation's sources: its function's module, and what of this room that imports or launches."""
    found = hashlib.sha256()
    for name in sources(record):
        found.update(name.encode() + b"\0" + _file(name).read_bytes() + b"\0")
    return found.hexdigest()


def sources(record: Record) -> tuple[str, ...]:
    """The modules that `digest` is made of, sorted; none for what is torch's own."""
    return _reached(record.runs.partition(":")[0] if isinstance(record.runs, str) else _module(record.runs))


def kernel_sources(kernel: str) -> tuple[str, ...]:
    """The modules and files that a kernel is made from, sorted, by its name as launches have it."""
    return _reached(kernel.partition(":")[0])


def file_digest(name: str) -> str | None:
    """SHA-256 of one of these modules or files; None where there is none of this name in this room."""
    if not _NAME.fullmatch(name) or not _file(name).is_file():
        return None
    return hashlib.sha256(_file(name).read_bytes()).hexdigest()


@cache
def _reached(first: str) -> tuple[str, ...]:
    wanted, found = [first], set[str]()
    while wanted:
        name = wanted.pop()
        if _NAME.fullmatch(name) and _file(name).is_file() and name not in found:
            found.add(name)
            wanted += _included(name) if name.endswith(_CUDA) else _imported(name)
    return tuple(sorted(found))


@cache
def _imported(name: str) -> list[str]:
    """What a module imports, inside of functions too, and what it names as kernels.

    `from package import name` may name a module.
    """
    nodes = list(ast.walk(ast.parse(_file(name).read_bytes())))
    imports = [each for each in nodes if isinstance(each, ast.ImportFrom)]
    modules = [f"{each.module}{end}" for each in imports for end in ("", *(f".{alias.name}" for alias in each.names))]
    strings = [each.value for each in nodes if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return modules + [text.partition(":")[0] for text in strings if text.startswith(f"{_ROOM}.")]


def _included(name: str) -> list[str]:
    """The headers that a file of CUDA C++ includes, as this module names files."""
    return [f"{_ROOM}{'.' if '/' in each else '/'}{each}" for each in included(_file(name).read_text(encoding="utf-8"))]


def _module(launches: Launches) -> str:
    """Where the function of a record, or the one that a partial calls, is written."""
    function = launches.func if isinstance(launches, partial) else launches
    return function.__module__


def _file(name: str) -> Path:
    inner = name.removeprefix(_ROOM)[1:]
    return Path(__file__).parent / (inner if name.endswith(_CUDA) else inner.replace(".", "/") + ".py")
