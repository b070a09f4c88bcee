"""What records and launches name as `module:path`, imported when it is first wanted."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from operator import attrgetter
from typing import Any


@cache
def named(text: str) -> Any:
    """The function at `path` in `module`."""
    module, _, path = text.partition(":")
    return attrgetter(path)(import_module(module))
