"""What the host spends on a step of an engine, part by part: each part's own time, without that of parts inside it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

PARTS = ("schedule", "arrays", "draws", "places", "replay", "send", "collect", "arrive", "hand out", "the rest")


class StepParts:
    """Times the parts of an engine's steps while it is open. `microseconds` has a list for each part, by step."""

    def __init__(self, engine: Any, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self.microseconds: dict[str, list[float]] = {part: [] for part in PARTS}
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
            (runner, "_send", "send"),
            (runner, "collect", "collect"),
            (engine._scheduler, "arrived", "arrive"),
            (engine, "_hand_out", "hand out"),
        ):
            self._wrap(owner, method, part)
        return self

    def __exit__(self, *_: object) -> None:
        for owner, method in self._wrapped:
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

    def _wrap(self, owner: Any, method: str, part: str) -> None:
        setattr(owner, method, self._timed(part, getattr(owner, method)))
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
