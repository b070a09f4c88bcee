"""A request as the scheduler knows it, and what one step computes of the requests that run."""

from __future__ import annotations

import dataclasses
from array import array
from typing import TYPE_CHECKING

from precast.loader.cache.tables import SequenceTable
from precast.loader.run.batch import Chunk

if TYPE_CHECKING:
    from precast.loader.cache.prefixes import Block

Rank = tuple[int, int]
"""Sorts requests: the highest priority first, and within it the one that came first."""


class Request:
    """One sequence: its tokens so far, and how many of them are in the cache.

    `max_length` counts prompt and answer. The last token of an answer is never computed, so it needs no place in the
    cache. `prefill_length` is the length that the tokens had when their computation began, or began anew because of
    their length; one that is computed again because its pages were taken keeps it. `table` is None while it waits,
    `row` its place among those that decode, -1 elsewhere. One that doesn't `share` runs alone: it goes on from nothing
    that others left, and leaves nothing, so that what fits the empty cache is sure to fit.
    """

    __slots__ = (
        "arrival",
        "blocks",
        "digests",
        "id",
        "max_length",
        "num_computed",
        "num_registered",
        "num_reused",
        "prefill_length",
        "priority",
        "prompt_length",
        "restores",
        "row",
        "shared_length",
        "shares",
        "table",
        "token_ids",
    )

    def __init__(self, request_id: int, prompt: array[int], max_length: int, priority: int = 0) -> None:
        """`prompt`: int64 token ids, at least one, and fewer than `max_length`. A higher `priority` goes first."""
        assert 0 < len(prompt) < max_length
        self.id = request_id
        self.priority = priority
        self.arrival = 0  # set by the scheduler
        self.token_ids = array("q", prompt)
        self.prompt_length = self.prefill_length = len(prompt)
        self.max_length = max_length
        self.num_computed = 0  # not kept up while it decodes: see `num_cached`
        self.num_reused = 0  # tokens of `num_computed` that another sequence computed
        self.row = -1
        self.shares = True
        self.table: SequenceTable | None = None
        # Of its prefix (`prefixes.py`): the digests of its first blocks, the blocks it keeps from being dropped,
        # how many blocks it has offered, how far it is known, and the states to copy before its first chunk.
        self.digests: list[bytes] = []
        self.blocks: list[Block] = []
        self.num_registered = 0
        self.shared_length = 0
        self.restores: dict[str, int] = {}

    @property
    def num_cached(self) -> int:
        """Tokens whose keys, values and states are in the cache."""
        return self.num_computed if self.row < 0 else len(self.token_ids) - 1

    @property
    def num_pending(self) -> int:
        """Tokens that are known and not computed yet: 1 in decode."""
        return len(self.token_ids) - self.num_cached

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def rank(self) -> Rank:
        return -self.priority, self.arrival


class ScheduledChunk:
    """`length` tokens of a request, computed in this step. `samples`: the step also draws its next token."""

    __slots__ = ("length", "request", "samples")

    def __init__(self, request: Request, length: int) -> None:
        self.request = request
        self.length = length
        self.samples = length == request.num_pending

    def chunk(self) -> Chunk:
        """What the batch needs of it."""
        request, start = self.request, self.request.num_cached
        assert request.table is not None
        return Chunk(
            token_ids=request.token_ids[start : start + self.length],
            start=start,
            prefill_length=request.prefill_length,
            pages=request.table,
            logits="last" if self.samples else "none",
        )


@dataclasses.dataclass(frozen=True)
class PageCopy:
    """Copy one page of a group, all its layers, onto another."""

    group: str
    source: int
    target: int


@dataclasses.dataclass(frozen=True)
class Step:
    """What is computed together: one token of each request that decodes, and chunks of others.

    Before that, all `saves` are copied, and then all `restores`: a page that is saved may be one to restore from.
    """

    decodes: list[Request]
    chunks: list[ScheduledChunk]
    saves: list[PageCopy] = dataclasses.field(default_factory=list)
    restores: list[PageCopy] = dataclasses.field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(scheduled.length for scheduled in self.chunks)

    @property
    def sampled(self) -> list[Request]:
        """The requests that get a token, in the order of the logits' rows."""
        return [*self.decodes, *(scheduled.request for scheduled in self.chunks if scheduled.samples)]
