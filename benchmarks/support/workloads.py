"""Synthetic requests: seeded streams of prompt and answer lengths, and token ids that share prefixes.

Lengths are log-normal, between a least and a most. Each workload offers more than the memory holds: a request waits
at all times, so what runs is what fits.
"""

from __future__ import annotations

import dataclasses
import math
import random
from array import array
from collections.abc import Iterator

from precast.loader.schedule.requests import Request

NUM_SYSTEM_PROMPTS = 8
SHARED_SHARE = 0.5
"""Of the requests that begin with a system prompt."""


@dataclasses.dataclass(frozen=True)
class Lengths:
    """A log-normal length: its median, the deviation of its logarithm, and its bounds."""

    median: int
    sigma: float
    least: int
    most: int

    def draw(self, draw: random.Random) -> int:
        return min(max(round(draw.lognormvariate(math.log(self.median), self.sigma)), self.least), self.most)


@dataclasses.dataclass(frozen=True)
class Workload:
    """Prompts, answers, and the length of the prefix that some requests share."""

    name: str
    prompt: Lengths
    answer: Lengths
    shared_length: int

    def lengths(self, max_length: int, seed: int = 0) -> Iterator[tuple[int, int]]:
        """Tokens of prompt and answer, request by request, without end; together at most `max_length`."""
        draw = random.Random(f"{self.name} {seed}")
        while True:
            answer = min(self.answer.draw(draw), max_length // 4)
            yield min(self.prompt.draw(draw), max_length - answer), answer

    def requests(self, max_length: int, *, shares: bool, seed: int = 0) -> Iterator[Request]:
        """Requests without end. `shares`: with token ids, of which some begin alike; else all ids are 0."""
        draw = random.Random(f"{self.name} ids {seed}")
        shared = [_token_ids(draw, self.shared_length) for _ in range(NUM_SYSTEM_PROMPTS)]
        for number, (prompt, answer) in enumerate(self.lengths(max_length, seed)):
            ids = array("q", bytes(8 * prompt))
            if shares:
                begin = draw.choice(shared) if draw.random() < SHARED_SHARE else array("q")
                ids = (begin + _token_ids(draw, max(prompt - len(begin), 0)))[:prompt]
            yield Request(number, ids, prompt + answer)

    def mean_lengths(self, max_length: int, count: int = 2000) -> list[int]:
        """Tokens that requests have at half of their answers."""
        stream = self.lengths(max_length, seed=1)
        return [prompt + answer // 2 for prompt, answer in (next(stream) for _ in range(count))]


CHAT = Workload("short chat", Lengths(500, 0.8, 32, 4_000), Lengths(250, 0.7, 16, 2_000), 256)
DOCUMENTS = Workload("long documents", Lengths(16_000, 0.7, 4_000, 100_000), Lengths(800, 0.6, 100, 4_000), 2_048)
MIXED = Workload("mixed, heavy-tailed", Lengths(900, 1.6, 16, 32_000), Lengths(300, 1.0, 16, 8_000), 512)
WORKLOADS = (CHAT, DOCUMENTS, MIXED)


def _token_ids(draw: random.Random, count: int) -> array[int]:
    """Random ids below 2 ** 16."""
    return array("q", memoryview(draw.randbytes(2 * count)).cast("H"))
