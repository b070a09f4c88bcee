"""Which tensors of a checkpoint the graph doesn't use, in few patterns: by whole parts of the model, not one by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from precast.ir.recipes import matches


def unused_patterns(names: Iterable[str], used: Iterable[str]) -> tuple[str, ...]:
    """Patterns that describe all of `names` but those in `used`, sorted: `model.vision_tower.*`, or a single name.

    Where layers differ only by their number, `*` stands for it, unless a used tensor has such a name.
    """
    kept = set(used)
    parts = {prefix for name in kept for prefix in itertools.accumulate(name.split("."), "{}.{}".format)}
    found = {_part(name, parts) for name in names if name not in kept}
    numbered = {_numbers_starred(pattern) for pattern in found}
    safe = {pattern for pattern in numbered if not _any(pattern, kept)}
    return tuple(sorted(safe | {pattern for pattern in found if _numbers_starred(pattern) not in safe}))


def _part(name: str, parts: set[str]) -> str:
    """The largest part of the model with this tensor in it of which nothing is used."""
    prefixes = list(itertools.accumulate(name.split("."), "{}.{}".format))
    whole = next((prefix for prefix in prefixes if prefix not in parts), name)
    return name if whole == name else whole + ".*"


def _numbers_starred(pattern: str) -> str:
    return ".".join("*" if word.isdigit() else word for word in pattern.split("."))


def _any(pattern: str, names: Iterable[str]) -> bool:
    return any(matches(pattern, name) for name in names)
