"""The sources of an implementation: what was measured of it, or compiled, counts as long as they stay as they are."""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from precast.kernels.records import Record


def digest(record: Record) -> str:
    """SHA-256 of an implementation's sources: its function's module, and the modules of this room that it imports."""
    found = hashlib.sha256()
    for name in sources(record):
        found.update(name.encode() + b"\0" + _source(name).encode() + b"\0")
    return found.hexdigest()


def sources(record: Record) -> tuple[str, ...]:
    """The modules that `digest` is made of, sorted; none for what is torch's own."""
    wanted = [record.runs.partition(":")[0]] if isinstance(record.runs, str) else []
    found: set[str] = set()
    while wanted:
        name = wanted.pop()
        if name.startswith("precast.kernels.") and name not in found:
            found.add(name)
            wanted += _imported(name)
    return tuple(sorted(found))


@cache
def _imported(name: str) -> tuple[str, ...]:
    """The modules of this room that a module imports, inside of functions too."""
    found = []
    for node in ast.walk(ast.parse(_source(name))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            # `from package import module` names a module, `from module import name` does not.
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return tuple(each for each in found if each.startswith("precast.kernels.") and _file(each) is not None)


@cache
def _source(name: str) -> str:
    file = _file(name)
    assert file is not None, f"{name} is a module of this room"
    return file.read_text(encoding="utf-8")


def _file(name: str) -> Path | None:
    """A module's file, found without importing the module."""
    try:
        spec = find_spec(name)
    except ModuleNotFoundError:  # a name inside of a module
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)
