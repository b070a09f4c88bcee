"""Processes as /proc shows them: who is whose child, and whether they have ended."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

LONG = 300.0
"""Seconds after which a process is taken for one that stays."""


class _Process(NamedTuple):
    pid: int
    state: str
    parent: int
    group: int


def ends(pid: int) -> bool:
    """Whether the process ends; one that was killed takes a moment."""
    deadline = time.monotonic() + LONG
    while any(each.pid == pid and each.state not in "ZX" for each in _processes()):
        if time.monotonic() > deadline:
            return False
        os.sched_yield()
    return True


def members(group: int) -> list[int]:
    """The processes of this group, also those that have ended and wait for whoever inherited them."""
    return [each.pid for each in _processes() if each.group == group]


def children(pid: int) -> list[int]:
    """The processes that this one has started."""
    return [each.pid for each in _processes() if each.parent == pid]


def _processes() -> Iterator[_Process]:
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has gone meanwhile
            state, parent, group, *_ = file.read_text().rpartition(")")[2].split()
            yield _Process(int(file.parent.name), state, int(parent), int(group))
