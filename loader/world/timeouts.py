"""How long ranks wait for one another, phase by phase: the one place that says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from precast.ir import limits
from precast.ir.errors import RequestError, shown_value

_MARGIN = 5.0
"""Seconds: hosts look at their clocks only now and then."""


class Timeouts(NamedTuple):
    """Seconds. What takes longer ends all ranks, with a message that names who was waited for.

    `join`: from the start until all ranks are there. `agree`: for what ranks do between two agreements, besides reading
    weights (`load`) and capturing one size (`capture`). `step`: one step; the first of its kind compiles kernels.
    `end`: for ranks to end by themselves; those that don't are killed.
    """

    join: float = 120.0
    agree: float = 120.0
    load: float = 1800.0
    capture: float = 600.0
    step: float = 120.0
    end: float = 10.0

    @property
    def kernel(self) -> float:
        """Seconds that a kernel waits for another rank's: longer than hosts take to find it late in a step or a
        capture, and to tell kernels to stop. One that stops by itself does so with an error, after which the process
        has no use of its GPU."""
        return max(self.step, self.capture) + self.end + _MARGIN


def timeouts_of(changes: Mapping[str, float] | None) -> Timeouts:
    """The defaults with these changes. Raises RequestError for other names, and for what is no number above 0."""
    for name, seconds in (changes or {}).items():
        if name not in Timeouts._fields:
            found = f"timeouts has {shown_value(name)}, expected {', '.join(Timeouts._fields)}"
            raise RequestError("engine-option-invalid", found)
        is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not is_number or not 0 < seconds <= limits.MAX_SECONDS:
            expected = f"seconds above 0, and at most {limits.MAX_SECONDS}"
            found = f"the timeout {name} is {shown_value(seconds)}, expected {expected}"
            raise RequestError("engine-option-invalid", found)
    return Timeouts()._replace(**(changes or {}))
