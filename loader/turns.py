"""How long threads keep the interpreter from one another while some of them read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

TURN_SECONDS = 1e-4
"""How long a thread may keep the interpreter from another while weights stream. With Python's 5 ms, whatever is made
ready meanwhile would keep the threads that read waiting at each of their calls."""


@contextmanager
def short_turns() -> Iterator[None]:
    """While open, threads take turns at the interpreter of `TURN_SECONDS`."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(TURN_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
