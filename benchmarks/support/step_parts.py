"""What the host spends on a step of an engine, part by part: each part's own time, without that of parts inside it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection
from typing import Any

PARTS = ("schedule", "arrays", "places", "replay", "wait", "collect", "arrive", "hand out", "the rest")
"""`wait`: for the device. `the rest` has the program, where it runs op by op."""


class StepParts:
    """Times parts of an engine's steps while it is open. `microseconds` has a list for each part, by step."""

    def __init__(
        self, engine: Any, *, parts: Collection[str] = PARTS, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Parts that are left out count as what they lie in. `clock` gives seconds."""
        self.microseconds: dict[str, list[float]] = {part: [] for part in PARTS}
        self._parts = parts
        self._clock = clock
        self._step = dict.fromkeys(PARTS, 0.0)
        self._inside: list[float] = []  # of each part that is open: the time that parts inside it took
        self._wrapped: list[tuple[Any, str]] = []
        self._engine = engine

    def __enter__(self) -> StepParts:
        engine, runner = self._engine, self._engine._runner
        _, _, places = runner.opened()
        for owner, method, part in (
            (engine._scheduler, "schedule_ahead", "schedule"),
            (engine._scheduler, "launched", "schedule"),
            (runner._inputs, "arrays", "arrays"),
            (places, "fill", "places"),
            (runner.captures, "replay", "replay"),
            (runner, "collect", "collect"),
            (engine._scheduler, "arrived", "arrive"),
            (engine, "_hand_out", "hand out"),
        ):
            if part in self._parts:
                self._wrap(owner, method, self._timed(part, getattr(owner, method)))
        wait = self._timed("wait", lambda ticket: ticket.arrived.synchronize())
        collect = runner.collect

        def waited(ticket: Any) -> Any:
            wait(ticket)
            return collect(ticket)

        self._wrap(runner, "collect", waited)
        return self

    def __exit__(self, *_: object) -> None:
        for owner, method in self._wrapped:
            if method in vars(owner):
                delattr(owner, method)  # the class's own method is found again

    def step(self) -> None:
        """One step of the engine."""
        self._step = dict.fromkeys(PARTS, 0.0)
        self._timed("the rest", self._engine.step)()
        for part, seconds in self._step.items():
            self.microseconds[part].append(1e6 * seconds)

    def medians(self) -> dict[str, float]:
        """Microseconds a step of each part."""
        return {part: round(statistics.median(found), 1) for part, found in self.microseconds.items() if any(found)}

    def _wrap(self, owner: Any, method: str, call: Callable[..., Any]) -> None:
        setattr(owner, method, call)
        self._wrapped.append((owner, method))

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0.0)
            started = self._clock()
            try:
                return call(*args, **kwargs)
            finally:
                spent = self._clock() - started
                self._step[part] += spent - self._inside.pop()
                if self._inside:
                    self._inside[-1] += spent

        return timed
