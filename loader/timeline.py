"""What a load spent its time on: named phases with bytes and counters, as JSON and as a picture.

Phases may overlap and may be recorded from several threads. Times are seconds of one monotonic clock, counted from
the timeline's origin; a phase that ran before the timeline was made (the import of torch) is added with its times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

BAR_WIDTH = 32
_UNITS = ("B", "kB", "MB", "GB", "TB")


class Phase(msgspec.Struct):
    """One step of a load: when it began (seconds from the origin), how long it took, what it moved and counted.

    `seconds` is None while the phase runs, and stays None if it ended with an error. `note` says what was decided.
    """

    name: str
    start: float
    seconds: float | None = None
    bytes: int | None = None
    counters: dict[str, int] = {}
    note: str = ""


class Timeline:
    """The phases of one load, in the order in which they began to be recorded."""

    def __init__(self, *, origin: float | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        """`origin` is the reading of `clock` that counts as zero; by default now."""
        self._clock = clock
        self.origin = clock() if origin is None else origin
        self.phases: list[Phase] = []
        self.ranks: dict[int, dict[str, Any]] = {}  # what other ranks have spent their time on, by rank: `to_dict`

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Record the body as a phase; the body may note what it moved and counted."""
        phase = Phase(name, self._clock() - self.origin)
        self.phases.append(phase)
        yield phase
        phase.seconds = self._clock() - self.origin - phase.start

    def add(self, name: str, *, start: float, seconds: float, num_bytes: int | None = None) -> Phase:
        """Record a phase that was timed elsewhere; `start` is a reading of the timeline's clock."""
        phase = Phase(name, start - self.origin, seconds, num_bytes)
        self.phases.append(phase)
        return phase

    def total_seconds(self) -> float:
        """From the first phase's start to the last one's end; 0 without phases."""
        first = min((phase.start for phase in self.phases), default=0.0)
        return max((phase.start + (phase.seconds or 0.0) for phase in self.phases), default=0.0) - first

    def to_dict(self) -> dict[str, Any]:
        """`{"total_seconds": ..., "phases": [{"name", "start", "seconds", "bytes", "counters"}, ...]}`, with the `note`
        of a phase that has one.

        Where ranks share the model, `"ranks": {"1": ..., ...}` has the same of each other rank, from its own origin.
        """
        phases = [msgspec.to_builtins(phase) for phase in self.phases]
        for phase in phases:
            if not phase["note"]:
                del phase["note"]
        found: dict[str, Any] = {"total_seconds": self.total_seconds(), "phases": phases}
        if self.ranks:
            found["ranks"] = {str(rank): timeline for rank, timeline in self.ranks.items()}
        return found

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return msgspec.json.encode(self.to_dict()).decode()

    def text(self) -> str:
        """A line a phase: name, start, duration, bytes and rate, counters, and its place in the whole as a bar."""
        if not self.phases:
            return "no phases"
        origin = min(phase.start for phase in self.phases)
        scale = BAR_WIDTH / (self.total_seconds() or 1.0)
        width = max(len(phase.name) for phase in self.phases)
        return "\n".join(_line(phase, width, origin, scale) for phase in self.phases)


def _line(phase: Phase, width: int, origin: float, scale: float) -> str:
    seconds = phase.seconds or 0.0
    left = min(int((phase.start - origin) * scale), BAR_WIDTH - 1)
    length = min(max(1, round(seconds * scale)), BAR_WIDTH - left)
    bar = " " * left + "#" * length + " " * (BAR_WIDTH - left - length)
    took = "unfinished" if phase.seconds is None else f"{seconds:8.3f} s"
    notes = [] if phase.bytes is None else [amount(phase.bytes)]
    if phase.bytes is not None and seconds > 0:
        notes.append(f"{amount(phase.bytes / seconds)}/s")
    notes += [f"{counter}={number}" for counter, number in sorted(phase.counters.items())]
    notes += [phase.note] if phase.note else []
    return f"{phase.name:<{width}} {phase.start:8.3f} s {took:>10} |{bar}| {'  '.join(notes)}".rstrip()


def amount(count: float) -> str:
    """A number of bytes in the unit that suits it: `1.50 GB`."""
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count /= 1000
        unit += 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.2f} {_UNITS[unit]}"
