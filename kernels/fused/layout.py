"""The steps of a fused op as its kernel takes them: a text that is a constant of the kernel."""

from __future__ import annotations

import json
from functools import cache
from typing import Any


@cache
def _loaded(text: str) -> Any:
    return json.loads(text)


def at(text: str, *path: str | int) -> Any:
    """What stands at this path."""
    found = _loaded(text)
    for part in path:
        found = found[part]
    return found


def count(text: str, *path: str | int) -> int:
    """How many items the list at this path has."""
    return len(at(text, *path))
