"""The digest of an implementation's source files: what was measured or compiled is valid while it stays the same."""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from pathlib import Path

from precast.kernels.records import Record

_ROOM = "precast.kernels."


def digest(record: Record) -> str:
    """SHA-256 of an implementation's sources: its function's module, and the modules of this room that it imports."""
    found = hashlib.sha256()
    for name in sources(record):
        found.update(name.encode() + b"\0" + _file(name).read_bytes() + b"\0")
    return found.hexdigest()


def sources(record: Record) -> tuple[str, ...]:
    """The modules that `digest` is made of, sorted; none for what is torch's own."""
    wanted = [record.runs.partition(":")[0]] if isinstance(record.runs, str) else []
    found: set[str] = set()
    while wanted:
        name = wanted.pop()
        if name.startswith(_ROOM) and _file(name).is_file() and name not in found:
            found.add(name)
            wanted += _imported(name)
    return tuple(sorted(found))


@cache
def _imported(name: str) -> list[str]:
    """What a module imports, inside of functions too; `from package import name` may name a module."""
    nodes = [each for each in ast.walk(ast.parse(_file(name).read_bytes())) if isinstance(each, ast.ImportFrom)]
    return [f"{each.module}{end}" for each in nodes for end in ("", *(f".{alias.name}" for alias in each.names))]


def _file(name: str) -> Path:
    return Path(__file__).parent.joinpath(*name.removeprefix(_ROOM).split(".")).with_suffix(".py")
