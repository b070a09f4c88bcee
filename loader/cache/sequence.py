"""The one account of a sequence: its tokens, how many of them are computed, and the pages and prefix that it holds."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from precast.loader.cache.spans import Point, Span
from precast.loader.cache.tables import SequenceTable


class CachedSequence:
    """Tokens that are known, and what the caches hold of them.

    `num_pending` tokens at the end of `token_ids` are not computed yet. `num_unknown` tokens at the end are those of
    steps that were launched and have not arrived: in its place such a token has `-1 - row`, the row in which its step
    draws it. `prefill_length` is the length that the tokens had when their computation began, or began anew because of
    their length; a sequence that is computed again because its pages were taken keeps it. Its `table` is empty while it
    waits. `reuses_prefixes` False: it starts from its first token whatever others left, and leaves nothing.
    """

    def __init__(self, token_ids: array[int]) -> None:
        """`token_ids` are int64, at least one."""
        self.token_ids = token_ids
        self.num_pending = self.prefill_length = len(token_ids)
        self.num_unknown = 0
        self.num_reused = 0  # computed tokens that another sequence computed
        self.reuses_prefixes = True
        self.table = SequenceTable(())
        # Of its prefix, kept by `Prefixes`: the digests of its first spans, the spans that it keeps from being dropped,
        # the points that fall if its logits turn out to be NaN, whether a token was drawn since it started, how many
        # spans it has offered, how many tokens were known when it started, and the states to copy before its first
        # chunk.
        self.digests: list[bytes] = []
        self.spans: list[Span] = []
        self.points: list[Point] = []
        self.is_proven = False
        self.num_registered = 0
        self.shared_length = 0
        self.restores: dict[str, int] = {}

    @property
    def num_known(self) -> int:
        """Tokens that are on the host."""
        return len(self.token_ids) - self.num_unknown

    def forget_unknown(self) -> None:
        """Cut off what hasn't arrived."""
        if self.num_unknown:
            del self.token_ids[-self.num_unknown :]
            self.num_unknown = 0

    @property
    def num_computed(self) -> int:
        """Tokens whose keys, values and states are in the caches."""
        return len(self.token_ids) - self.num_pending

    @num_computed.setter
    def num_computed(self, count: int) -> None:
        self.num_pending = len(self.token_ids) - count


def expect_tokens(sequences: Iterable[CachedSequence], first_row: int = 0) -> None:
    """One token more for each, which the step that has just been launched draws in the rows from `first_row` on."""
    for row, sequence in enumerate(sequences, first_row):
        sequence.token_ids.append(-1 - row)
        sequence.num_unknown += 1


def learn_tokens(sequences: Iterable[CachedSequence], token_ids: Iterable[int]) -> None:
    """The first of the unknown tokens of each has arrived. A sequence that has none has ended: it gets no token."""
    for sequence, token_id in zip(sequences, token_ids, strict=True):
        unknown = sequence.num_unknown
        if unknown:
            sequence.token_ids[-unknown] = token_id
            sequence.num_unknown = unknown - 1
