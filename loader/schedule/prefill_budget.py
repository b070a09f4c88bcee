"""How many prompt tokens a step computes beside sequences that decode, by how long such steps took so far.

All sequences of a step wait for all of its tokens. So where prompts are computed beside sequences that decode, these
get their next tokens later, by as much as the step takes longer than one without prompts. It may take `MULTIPLE` times
as long, and is filled to the largest size, in tokens, of which steps are as fast as that.

Nothing here knows clocks or devices: whoever computes steps says how many tokens they had and how long they took.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from precast.ir.memory.capture import spaced

MULTIPLE = 2.5
"""Of a decode step's time: what a step with prompts may take. The goal is that 99 of 100 tokens come within three times
the median. A sixth is left for a prompt's later chunks, whose attention looks back further, and for the host."""
LEAST_TOKENS = 128
"""Of prompts, beside any number of sequences. So few take about as long as reading the weights does. With fewer,
prompts would wait longer, and nobody less."""
DECODES = 5
"""The last steps without prompts, whose median counts: the first of them may have compiled kernels."""
LEAST_DECODES = 3
"""So many must be known before prompts are computed beside others."""
MIXED = 8
"""The last steps with prompts, of each size, of which the slowest but one counts: the slowest may have been held up."""
DECODE_AFTER = 64
"""Steps with prompts after which one without is computed, where none comes by itself, to learn what it takes now."""
DECODE_EVERY = 8
"""Of steps without prompts, where one follows the other, so many for each that is measured: they are all alike."""
FORGOTTEN_AFTER = 256
"""Steps with prompts after which a size that none of them had may be tried again: what made it slow, such as a long
prompt, may be over."""


class PrefillBudget:
    """The seconds that steps with decodes took lately, and what follows for the next one."""

    def __init__(self, max_num_tokens: int, captured_sizes: Sequence[int] = ()) -> None:
        """`captured_sizes`: steps are padded to these, larger ones, up to `max_num_tokens`, not at all."""
        largest = max(captured_sizes, default=0)
        sizes = {*captured_sizes, *(size for size in spaced(max_num_tokens) if size > largest)}
        self._sizes = sorted({min(size, max_num_tokens) for size in sizes})
        self._decodes: deque[tuple[int, float]] = deque(maxlen=DECODES)  # sizes and seconds
        self._mixed: dict[int, deque[float]] = {}
        self._last_mixed: dict[int, int] = {}  # the number of the last step of this size, of those with prompts
        self._num_mixed = 0
        self._since_decode = 0
        self._unmeasured = 0  # steps without prompts

    def is_wanted(self, *, has_prompts: bool) -> bool:
        """Whether the next step, in which sequences decode, is to be measured."""
        if has_prompts or self._since_decode or len(self._decodes) < DECODES:
            return True
        self._unmeasured = (self._unmeasured + 1) % DECODE_EVERY
        return self._unmeasured == 0

    def measured(self, num_tokens: int, seconds: float, *, has_prompts: bool) -> None:
        """A step in which sequences decoded took so long. It computed `num_tokens`, its padding included."""
        size = self._size_for(num_tokens)
        if not has_prompts:
            self._decodes.append((size, seconds))
            self._since_decode = 0
            return
        window = self._mixed.setdefault(size, deque(maxlen=MIXED))
        if self._is_forgotten(size):
            window.clear()
        window.append(seconds)
        self._num_mixed += 1
        self._since_decode += 1
        self._last_mixed[size] = self._num_mixed

    def beside(self, num_decodes: int) -> int:
        """The most prompt tokens of a step in which so many sequences decode. 0: it is to be measured without prompts.

        A size that was not measured takes, at most, as long as its tokens in the smaller sizes that were.
        """
        best = least = self._size_for(num_decodes + LEAST_TOKENS)
        if least == self._sizes[-1]:
            return max(least - num_decodes, 1)
        if len(self._decodes) < LEAST_DECODES or self._since_decode >= DECODE_AFTER:
            return 0
        allowed = MULTIPLE * self._decode_seconds(num_decodes)
        seconds_per_token = math.inf
        for size in self._sizes:
            seconds = self._mixed_seconds(size)
            if seconds is None:
                seconds = seconds_per_token * size
            else:
                seconds_per_token = min(seconds_per_token, seconds / size)
            if size > least and seconds <= allowed:
                best = size
        return best - num_decodes

    def _decode_seconds(self, num_decodes: int) -> float:
        """Of a step without prompts, at least: fewer sequences take no longer, and not more of them a second."""
        size = self._size_for(num_decodes)
        found = sorted(seconds * min(1.0, size / other) for other, seconds in self._decodes)
        return found[(len(found) - 1) // 2]  # the median; `statistics` takes a start longer to import

    def _mixed_seconds(self, size: int) -> float | None:
        """Of a step of this size with prompts; None if two of them were not measured lately."""
        window = self._mixed.get(size, ())
        return None if len(window) < 2 or self._is_forgotten(size) else sorted(window)[-2]

    def _is_forgotten(self, size: int) -> bool:
        return self._num_mixed - self._last_mixed.get(size, 0) > FORGOTTEN_AFTER

    def _size_for(self, num_tokens: int) -> int:
        return self._sizes[min(bisect_left(self._sizes, num_tokens), len(self._sizes) - 1)]
