"""Puts other functions in the place of a library's while a model is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """While the body runs, each module, class or object has this value under this name; then its own again, or none."""
    own = [(place, name, vars(place).get(name, _NONE)) for place, name, _ in changes]
    try:
        for place, name, value in changes:
            setattr(place, name, value)
        yield
    finally:
        for place, name, value in own:
            if value is _NONE:
                delattr(place, name)
            else:
                setattr(place, name, value)


_NONE = object()
