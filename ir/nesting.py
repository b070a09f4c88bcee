"""How deep a JSON value is nested: code that walks one recursively has to know before."""

from __future__ import annotations

from typing import Any

from precast.ir import limits


def is_too_deep(value: Any) -> bool:
    """Whether objects and arrays are nested deeper than `MAX_JSON_NESTING`. Iterative: no depth costs stack."""
    level = [value]
    for _ in range(limits.MAX_JSON_NESTING):
        level = [inner for item in level for inner in _inside(item) if isinstance(inner, (dict, list))]
    return bool(level)


def _inside(item: Any) -> list[Any]:
    return list(item.values()) if isinstance(item, dict) else item if isinstance(item, list) else []
