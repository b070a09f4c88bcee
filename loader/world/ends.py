"""What ranks have to do when a world ends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress


def call_all(calls: list[Callable[[], object]]) -> None:
    """Call each, whatever becomes of the others, and forget them."""
    for call in calls:
        with suppress(Exception):
            call()
    calls.clear()
