"""A request as the scheduler knows it, and what one step computes of the requests that run."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from functools import cached_property
from typing import Literal, NamedTuple

from precast.loader.cache.sequence import CachedSequence
from precast.loader.cache.spans import PageCopy

NO_TOKEN = -1
"""In the place of a drawn token: the row's logits were not finite, and its request has failed."""


class Draw(NamedTuple):
    """How the tokens of an answer are drawn: the arguments of `precast.sample` that are the same for all of them.

    `top_k` 0 keeps all tokens.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


GREEDY = Draw(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
"""The likeliest token, always."""


class Request(CachedSequence):
    """A sequence that somebody waits for.

    `max_length` counts prompt and answer. The last token of an answer is never computed, so it needs no place in the
    cache. `decode_index` is its place in the `DecodeBatch`, -1 while it is not in it. One that `runs_alone` has the
    cache to itself, so that what fits the empty cache is sure to fit.
    """

    def __init__(
        self, request_id: int, prompt: array[int], max_length: int, priority: int = 0, *, draw: Draw = GREEDY
    ) -> None:
        """`prompt`: int64 token ids, at least one, and fewer than `max_length`. A higher `priority` goes first."""
        assert 0 < len(prompt) < max_length
        super().__init__(array("q", prompt))
        self.id = request_id
        self.priority = priority
        self.arrival = 0  # set by the scheduler
        self.prompt_length = len(prompt)
        self.max_length = max_length
        self.draw = draw
        self.decode_index = -1
        self.runs_alone = False

    def run_alone(self) -> None:
        """From its next start on: beside no other, and without what others left."""
        self.runs_alone = True
        self.reuses_prefixes = False

    @property
    def is_decoding(self) -> bool:
        """Whether it has one token a step."""
        return self.decode_index >= 0

    @property
    def num_generated(self) -> int:
        """Tokens of its answer, those included that are not known yet."""
        return len(self.token_ids) - self.prompt_length

    @property
    def rank(self) -> tuple[int, int]:
        """Sorts requests: the highest priority first, and within it the one that came first."""
        return -self.priority, self.arrival


class Chunk:
    """The part of a request's tokens that a step computes: `length` of them, from the absolute position `start` on.

    `logits` says of which tokens the logits are wanted; by default of the last one, if all tokens before it are known.
    """

    def __init__(self, request: Request, length: int, logits: Literal["none", "last", "all"] | None = None) -> None:
        self.request = request
        self.length = length
        self.start = request.num_computed
        self.logits = logits or ("last" if length == request.num_pending else "none")

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.start + self.length

    @property
    def samples(self) -> bool:
        """Whether the request's next token is drawn."""
        return self.logits == "last"

    @property
    def token_ids(self) -> array[int]:
        """`[length]` int64, a copy."""
        return self.request.token_ids[self.start : self.end]


class Sizes(NamedTuple):
    """Tokens, sequences and rows of logits of a step: at least one of each."""

    num_tokens: int
    num_seqs: int
    num_rows: int


@dataclasses.dataclass(frozen=True)
class Step:
    """What is computed together: one token of each request that decodes, and chunks of others.

    Before that, all `saves` are copied, and then all `restores`: a page that is saved may be one to restore from.
    `sizes`: the step is made so large by tokens and slots of no sequence, as other ranks' steps are, which compute
    other sequences at the same time; None: it is as large as it is. Where ranks have sequences of their own, a step of
    all of them has a step of each in `shares`, of which the copies are, too.
    """

    decodes: list[Request]
    chunks: list[Chunk]
    saves: list[PageCopy] = dataclasses.field(default_factory=list)
    restores: list[PageCopy] = dataclasses.field(default_factory=list)
    sizes: Sizes | None = None
    shares: Sequence[Step] = ()

    @cached_property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(chunk.length for chunk in self.chunks)

    @property
    def requests(self) -> list[Request]:
        return [*self.decodes, *(chunk.request for chunk in self.chunks)]

    @cached_property
    def sampled(self) -> list[Request]:
        """The requests that get a token, in the order of the logits' rows."""
        if self.shares:
            return [request for share in self.shares for request in share.sampled]
        return [*self.decodes, *(chunk.request for chunk in self.chunks if chunk.samples)]
