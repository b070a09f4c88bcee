"""Which tokens of which sequences each step computes: continuous batching with chunked prefill.

A step has a budget of tokens. Sequences that decode come first, one token each; what is left goes to prompts, oldest
first, cut to the budget; while some is left, waiting requests are admitted in the order of their arrival. So a request
is admitted only in a step in which all that run have a token, and each that decodes has one in every step. Admission
reserves the pages of the longest answer that a request may get in every group at once, so that a sequence that runs
never runs out of pages.
"""

from __future__ import annotations

from array import array

from precast.ir.errors import RequestError
from precast.loader.batch import Chunk
from precast.loader.pools import PageTables, SequencePages


class Request:
    """One sequence: its tokens so far, and how many of them are in the cache.

    `max_length` counts prompt and answer. The last token of an answer is never computed, so it needs no place in the
    cache. `prefill_length` is the length that the tokens had when their computation began, or began anew.
    """

    __slots__ = ("id", "max_length", "num_cached", "pages", "prefill_length", "prompt_length", "token_ids")

    def __init__(self, request_id: int, prompt: array[int], max_length: int) -> None:
        """`prompt`: int64 token ids, at least one, and fewer than `max_length`."""
        assert 0 < len(prompt) < max_length
        self.id = request_id
        self.token_ids = array("q", prompt)
        self.prompt_length = self.prefill_length = len(prompt)
        self.max_length = max_length
        self.num_cached = 0
        self.pages: SequencePages | None = None

    @property
    def num_pending(self) -> int:
        """Tokens that are known and not computed yet: 1 in decode."""
        return len(self.token_ids) - self.num_cached

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.prompt_length


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
        assert request.pages is not None
        return Chunk(
            token_ids=request.token_ids[start : start + self.length],
            start=start,
            prefill_length=request.prefill_length,
            pages=request.pages,
            logits="last" if self.samples else "none",
        )


class Scheduler:
    """The requests that wait and run. It knows pages and tokens, and neither tensors nor text."""

    def __init__(
        self, tables: PageTables, *, max_num_seqs: int, max_num_tokens: int, restart_length: int | None = None
    ) -> None:
        """A sequence that grows to `restart_length` tokens is computed anew, from its first token."""
        self._tables = tables
        self._restart_length = restart_length
        self._max_num_seqs = max_num_seqs
        self._max_num_tokens = max_num_tokens
        self._waiting: dict[int, Request] = {}  # both in the order of arrival
        self._running: dict[int, Request] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def check(self, prompt_length: int, max_length: int) -> None:
        """Raise RequestError for a request that the empty cache can't hold."""
        num_tokens = max_length - 1
        if not self._tables.can_hold(num_tokens):
            raise RequestError(
                "prompt-too-large-for-cache",
                f"a prompt of {prompt_length} tokens and an answer of up to {max_length - prompt_length} are "
                f"{num_tokens} tokens to cache (the last is never cached): {self._tables.arithmetic(num_tokens)}",
                fix="lower max_tokens, shorten the prompt, or load with more cache_bytes",
            )

    def submit(self, request: Request) -> None:
        """Queue a request that `check` let through."""
        self._waiting[request.id] = request

    def schedule(self) -> list[ScheduledChunk]:
        """The chunks of the next step; empty only when nothing waits or runs. Admits, but computes nothing."""
        budget = self._max_num_tokens
        plan = [ScheduledChunk(request, 1) for request in self._running.values() if request.num_pending == 1]
        budget -= len(plan)
        for request in self._running.values():
            if budget and request.num_pending > 1:
                plan.append(ScheduledChunk(request, min(request.num_pending, budget)))
                budget -= plan[-1].length
        while budget and (admitted := self._admit()) is not None:
            plan.append(ScheduledChunk(admitted, min(admitted.num_pending, budget)))
            budget -= plan[-1].length
        return plan

    def complete(self, scheduled: ScheduledChunk, token_id: int | None) -> None:
        """The chunk is in the cache; `token_id` is what was drawn, for a chunk that samples."""
        request = scheduled.request
        request.num_cached += scheduled.length
        assert (token_id is not None) == scheduled.samples
        if token_id is not None:
            request.token_ids.append(token_id)
            if len(request.token_ids) == self._restart_length:
                request.num_cached = 0
                request.prefill_length = len(request.token_ids)

    def remove(self, request: Request) -> None:
        """Forget a request that has ended or is cancelled, and give back its pages."""
        if self._waiting.pop(request.id, None) is None:
            del self._running[request.id]
        if request.pages is not None:
            self._tables.release(request.pages)
            request.pages = None

    def _admit(self) -> Request | None:
        """The request that has waited longest, now running with all its pages; None while it has to wait on."""
        request = next(iter(self._waiting.values()), None)
        if request is None or len(self._running) >= self._max_num_seqs:
            return None
        if not self._tables.can_reserve(request.max_length - 1):
            return None
        request.pages = self._tables.reserve(request.max_length - 1)
        self._running[request.id] = self._waiting.pop(request.id)
        return request
