"""Loads in which some requests decode while the prompts of others are computed, and what is measured of them.

An engine is whatever has `submit`, `step`, `cancel`, `has_work` and `stats`; a clock says what time it is and waits.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from precast.loader.engine.params import SamplingParams
from precast.loader.engine.results import EngineStats, Event

GOAL_RATIO, GOAL_PADDING = 3.0, 15.0
"""Of the 99th percentile of the time between tokens and its median; of padding among computed tokens, in percent."""


class Serves(Protocol):
    """An engine, as far as it is used here."""

    @property
    def has_work(self) -> bool: ...
    @property
    def stats(self) -> EngineStats: ...
    def submit(self, prompt: list[int], params: SamplingParams) -> int: ...
    def step(self) -> list[Event]: ...
    def cancel(self, request_id: int) -> bool: ...


class Clock(Protocol):
    """Seconds since any moment, and a way to let some go by."""

    def now(self) -> float: ...
    def wait(self, seconds: float) -> None: ...


class WallClock:
    """The machine's."""

    def now(self) -> float:
        """As `Clock` says."""
        return time.perf_counter()

    def wait(self, seconds: float) -> None:
        """As `Clock` says."""
        time.sleep(seconds)


@dataclasses.dataclass(frozen=True)
class Load:
    """What is asked of an engine: tokens and numbers of requests, and how long requests arrive, in seconds.

    The engine takes `max_num_seqs` and `max_num_tokens`.
    """

    prompt_tokens: int = 1000
    answer_tokens: int = 256
    num_at_once: int = 320
    seconds: float = 20.0
    shares: tuple[float, ...] = (0.5, 0.8)
    num_decoding: int = 32
    long_prompt_tokens: int = 8000
    num_long: int = 12
    long_every: float = 0.75
    vocab: int = 100_000
    max_num_seqs: int = 256
    max_num_tokens: int = 8192


class Server:
    """Steps an engine, and keeps the time of each token by request. Requests arrive when they are due."""

    def __init__(self, engine: Serves, clock: Clock) -> None:
        self.engine, self._clock = engine, clock
        self.began = clock.now()
        self.arrived: dict[int, float] = {}
        self.times: dict[int, list[float]] = defaultdict(list)

    def now(self) -> float:
        """Seconds since it was made."""
        return self._clock.now() - self.began

    def submit(self, prompt: list[int], answer_tokens: int, *, due: float) -> int:
        """A request whose first token is waited for from `due` on."""
        number = self.engine.submit(prompt, SamplingParams(max_tokens=answer_tokens, ignore_eos=True))
        self.arrived[number] = due
        return number

    def step(self) -> None:
        """One step of the engine."""
        events = self.engine.step()
        now = self.now()
        for event in events:
            if event.request_id not in self.arrived:
                continue  # of a load that failed
            self.times[event.request_id] += [now] * len(event.token_ids)

    def serve(self, due: Sequence[float], submit: Callable[[float], object]) -> None:
        """Call `submit` with each of the times as it comes, until all that was submitted has ended."""
        left = list(reversed(due))
        while left or self.engine.has_work:
            while left and left[-1] <= self.now():
                submit(left.pop())
            if self.engine.has_work:
                self.step()
            else:
                self._clock.wait(max(1e-4, left[-1] - self.now()))


def prompts(count: int, num_tokens: int, load: Load, seed: int = 0) -> list[list[int]]:
    """Token ids, the same in every run; no two share a beginning."""
    draw = random.Random(seed)
    return [draw.choices(range(5, load.vocab), k=num_tokens) for _ in range(count)]


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """When requests arrive, by a Poisson process of `rate` requests a second: at least one."""
    draw = random.Random(seed)
    found = [draw.expovariate(rate)]
    while found[-1] < seconds:
        found.append(found[-1] + draw.expovariate(rate))
    return found[:-1] or found


def at_once(engine: Serves, clock: Clock, load: Load) -> dict[str, Any]:
    """All requests are there from the start: what an engine serves at most."""
    return _measure(engine, clock, load, [0.0] * load.num_at_once)


def over_time(engine: Serves, clock: Clock, load: Load, rate: float, seed: int = 0) -> dict[str, Any]:
    """Requests arrive at `rate`, a second."""
    return _measure(engine, clock, load, arrivals(rate, load.seconds, seed))


def _measure(engine: Serves, clock: Clock, load: Load, due: Sequence[float]) -> dict[str, Any]:
    asked = iter(prompts(len(due), load.prompt_tokens, load, seed=len(due)))
    before = engine.stats
    server = Server(engine, clock)
    server.serve(due, lambda at: server.submit(next(asked), load.answer_tokens, due=at))
    ended = max(times[-1] for times in server.times.values())
    counts = counted(before, engine.stats)
    return {
        "requests": len(due),
        "seconds": round(ended, 2),
        "requests_per_s": round(len(due) / ended, 4),
        "tokens_out_per_s": round(sum(map(len, server.times.values())) / ended, 1),
        "first_token_ms": percentiles(times[0] - server.arrived[number] for number, times in server.times.items()),
        "inter_token_ms": percentiles(gaps(server.times.values())),
        **counts,
    }


def long_prompts(engine: Serves, clock: Clock, load: Load) -> dict[str, Any]:
    """Long prompts arrive, one after the other, while others decode: how long these wait for their tokens."""
    long = iter(prompts(load.num_long, load.long_prompt_tokens, load, seed=1))
    short = prompts(load.num_decoding, load.prompt_tokens, load, seed=2)
    server = Server(engine, clock)
    decoding = [server.submit(prompt, 1 << 14, due=0.0) for prompt in short]
    while any(len(server.times[number]) < 8 for number in decoding):
        server.step()
    before, began = engine.stats, server.now()
    left = [began + load.long_every * (i + 1) for i in reversed(range(load.num_long))]
    asked: list[int] = []
    while left or any(not server.times[number] for number in asked):
        if left and left[-1] <= server.now():
            asked.append(server.submit(next(long), 1, due=left.pop()))
        server.step()
    counts, budget = counted(before, engine.stats), engine.stats.prefill_budget
    for number in decoding:
        engine.cancel(number)
    while engine.has_work:
        engine.step()
    waits = percentiles(gaps([at for at in server.times[number] if at >= began] for number in decoding))
    return {
        "prompts": load.num_long,
        "first_token_ms": percentiles(server.times[number][0] - server.arrived[number] for number in asked),
        "inter_token_ms": waits,
        "ratio": round(waits["p99"] / max(waits["p50"], 1e-3), 2),
        "prefill_budget": budget,
        **counts,
    }


def counted(before: EngineStats, after: EngineStats) -> dict[str, Any]:
    """Steps by how they ran, and the share of padding, between two snapshots."""
    names = ("steps", "captured_steps", "piecewise_steps", "eager_steps", "tokens_prefilled", "tokens_decoded",
             "tokens_padded")  # fmt: skip
    found = {name: getattr(after, name) - getattr(before, name) for name in names}
    computed = found["tokens_prefilled"] + found["tokens_decoded"] + found["tokens_padded"]
    reasons = {why: count - before.eager_reasons.get(why, 0) for why, count in after.eager_reasons.items()}
    return {**found, "padding_percent": round(100 * found["tokens_padded"] / max(computed, 1), 2),
            "eager_reasons": {why: count for why, count in reasons.items() if count}}  # fmt: skip


def gaps(times: Iterable[Sequence[float]]) -> list[float]:
    """Seconds between the tokens of each answer."""
    return [after - before for each in times for before, after in itertools.pairwise(each)]


def percentiles(seconds: Iterable[float]) -> dict[str, float]:
    """The median and the 99th percentile, in milliseconds: the least value that so many are not above."""
    found = sorted(seconds)
    if not found:
        return {"p50": 0.0, "p99": 0.0}
    late = found[max(0, -(-99 * len(found) // 100) - 1)]
    return {"p50": round(1000 * statistics.median_low(found), 3), "p99": round(1000 * late, 3)}
