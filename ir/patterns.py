"""Patterns of names, as bundles, configs and policies have them."""

from __future__ import annotations


def matches(pattern: str, name: str) -> bool:
    """Whether the pattern describes the name: `*` stands for any run of characters, all else for itself.

    One pass over the name, unlike a regular expression, whatever the pattern is: patterns come from bundles, names
    from anyone.
    """
    first, *rest = pattern.split("*")
    if not rest:
        return name == pattern
    *middle, last = rest
    if not name.startswith(first) or len(name) < len(first) + len(last) or not name.endswith(last):
        return False
    position, end = len(first), len(name) - len(last)
    for part in middle:
        found = name.find(part, position, end)
        if found < 0:
            return False
        position = found + len(part)
    return True
