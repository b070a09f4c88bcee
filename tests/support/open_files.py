"""What this process has open, as far as the system lists it."""

from __future__ import annotations

import os
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

LISTED = Path("/proc/self/fd")


def new_since(before: Set[str] = frozenset()) -> Set[str]:
    """Descriptors, and what each leads to, that are open now and weren't. Threads that other tests have left may close
    theirs at any time, so to count is not enough.
    """
    found = set()
    for name in os.listdir(LISTED) if LISTED.exists() else ():
        with suppress(FileNotFoundError):  # the one that lists
            found.add(f"{name} {os.readlink(LISTED / name)}")
    return found - before
