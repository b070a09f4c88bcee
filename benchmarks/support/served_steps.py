"""What steps take as an engine serves them, by the clock: with any backend, so without torch. Prompts are random."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import precast

PROMPT_TOKENS = 128
COUNTS = (1, 8, 64, 256)
"""Sequences that decode."""
PROMPTS = ((1, 4096), (4, 8000))
"""Prompts that are computed together, and the tokens of each."""


def prompts(count: int, length: int) -> list[list[int]]:
    """Token ids, the same in every run."""
    draw = random.Random(count)
    return [[draw.randrange(5, 100_000) for _ in range(length)] for _ in range(count)]


def decoding(engine: Any, count: int) -> list[int]:
    """The numbers of `count` requests, all of which decode: none waits, and none ends while it is measured.

    Prompts are computed in as few steps as may be. Beside sequences that decode an engine takes fewer of their tokens
    in a step, and the first sequences would be a hundred tokens longer when the last one has begun.
    """
    params = precast.SamplingParams(max_tokens=1000, ignore_eos=True)
    numbers = [engine.submit(prompt, params) for prompt in prompts(count, PROMPT_TOKENS)]
    scheduler = engine._scheduler
    most_beside, scheduler._most_beside = scheduler._most_beside, None
    while engine.stats.tokens_decoded == 0 or scheduler._chunked or scheduler.num_waiting:
        engine.step()
    scheduler._most_beside = most_beside
    for _ in range(4):
        engine.step()
    return numbers


def end(engine: Any, numbers: list[int]) -> None:
    """Cancel these, and let go of what they held."""
    for number in numbers:
        engine.cancel(number)
    while engine.has_work:
        engine.step()


def decode_ms(engine: Any, count: int, rounds: int = 5) -> float:
    """Milliseconds a step of `count` sequences that decode: the median of rounds of eight steps."""
    numbers, times = decoding(engine, count), []
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(8):
            engine.step()
        times.append((time.perf_counter() - started) / 8)
    end(engine, numbers)
    return round(1000 * statistics.median(times), 3)


def prefill(engine: Any, count: int, length: int, runs: int = 3) -> float:
    """Tokens a second, of `count` prompts that are computed together: the median of as many runs."""
    rates = []
    for run in range(runs):
        engine.forget_prefixes()
        given = prompts(count + 100 * run, length)[:count]
        started = time.perf_counter()
        for prompt in given:
            engine.submit(prompt, precast.SamplingParams(max_tokens=1))
        while engine.has_work:
            engine.step()
        rates.append(count * length / (time.perf_counter() - started))
    return round(statistics.median(rates), 1)
