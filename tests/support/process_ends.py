"""Whether processes have ended, without asking again and again."""

from __future__ import annotations

import os
import select
from contextlib import suppress
from pathlib import Path

LONG = 300.0
"""Seconds after which a process is taken for one that stays."""


def ends(pid: int) -> bool:
    """Whether the process ends; one that was killed takes a moment."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], LONG)[0])
    finally:
        os.close(descriptor)


def members(group: int) -> list[int]:
    """The processes of this group, also those that have ended and wait for whoever inherited them."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has gone meanwhile
            after_the_name = file.read_text().rpartition(")")[2].split()
            if int(after_the_name[2]) == group:
                found.append(int(file.parent.name))
    return found
