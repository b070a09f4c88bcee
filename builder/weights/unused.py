"""Which tensors of a checkpoint the graph doesn't use, in few patterns: by whole parts of the model, not one by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from precast.ir.weights.recipes import matches


def unused_patterns(names: Iterable[str], used: Iterable[str]) -> tuple[str, ...]:
    """Patterns that describe all of `names` but those in `used`, sorted: `model.vision_tower.*`, or a single name.

    Where layers, or all their experts, differ only by their number, `*` stands for it, unless that names a used tensor.
    """
    kept = set(used)
    text = "\n".join(kept)
    parts = {prefix for name in kept for prefix in itertools.accumulate(name.split("."), "{}.{}".format)}
    found = {_part(name, parts) for name in names if name not in kept}
    for stars in (None, 1):
        safe = {short for short in {_numbers_starred(each, stars) for each in found} if not _any(short, kept, text)}
        found = safe | {pattern for pattern in found if _numbers_starred(pattern, stars) not in safe}
    return tuple(sorted(found))


def _part(name: str, parts: set[str]) -> str:
    """The largest part of the model with this tensor in it of which nothing is used."""
    prefixes = list(itertools.accumulate(name.split("."), "{}.{}".format))
    whole = next((prefix for prefix in prefixes if prefix not in parts), name)
    return name if whole == name else whole + ".*"


def _numbers_starred(pattern: str, count: int | None) -> str:
    """With `*` for the first `count` numbers, the layer's first; None: for all."""
    words = pattern.split(".")
    at = [place for place, word in enumerate(words) if word.isdigit()][:count]
    return ".".join("*" if place in at else word for place, word in enumerate(words))


def _any(pattern: str, names: Iterable[str], text: str) -> bool:
    """Whether it is a pattern of one of the names, of which `text` is made: most are seen there not to be."""
    literal = max(pattern.split("*"), key=len)
    return literal in text and any(matches(pattern, name) for name in names)
