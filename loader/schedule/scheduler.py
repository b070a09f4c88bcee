"""Which tokens of which sequences each step computes: continuous batching with chunked prefill.

A step has a budget of tokens. Sequences that decode come first, one token each; what is left goes to prompts, those of
the highest priority and the oldest first, cut to the budget; while some is left, waiting requests are admitted in the
same order. So nobody is overtaken, and only for a higher priority is a request admitted in a step in which one that
runs has no token.

A sequence gets pages as it grows, nothing is reserved for its answer. When one can't grow, prefixes that nobody uses
are given up, and then running requests are preempted: the lowest priority first, the youngest of it. They wait at
the head of their priority and are computed again. A request that waits takes places and pages too, but only from
those of a strictly lower priority, so nobody is preempted by those that it was preempted for. The oldest request of the
highest priority is never preempted for others, and what `check` let through fits the cache alone, so it always goes on.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from precast.ir.errors import RequestError
from precast.loader.cache.prefixes import Prefixes
from precast.loader.cache.tables import PageTables, SequenceTable
from precast.loader.schedule.requests import Rank, Request, ScheduledChunk, Step
from precast.loader.schedule.rows import DecodeRows

GROWTH_TOKENS = 32
"""Tokens by which each sequence that runs should be able to grow when another is admitted; a page, if that is less."""
RETRY_STEPS = 16
"""A request that found no room is looked at again when another ends, or after so many steps."""
MANY_GONE = 64
"""Requests that are gone stay in the queue until they come first in it, or are so many."""


class Scheduler:
    """The requests that wait and run. It knows pages and tokens, and neither tensors nor text."""

    def __init__(
        self,
        tables: PageTables,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        restart_length: int | None = None,
        prefixes: Prefixes | None = None,
    ) -> None:
        """A sequence that grows to `restart_length` tokens is computed anew, from its first token."""
        self.rows = DecodeRows(tables.plan, max_num_seqs)
        self.num_preemptions = 0
        self.num_tokens_reused = 0
        self._tables = tables
        self._prefixes = prefixes
        self._restart_length = restart_length
        self._max_num_seqs = max_num_seqs
        self._max_num_tokens = max_num_tokens
        self._num_arrivals = 0
        self._waiting: dict[int, Request] = {}
        self._queue: list[tuple[Rank, Request]] = []  # a heap of those that wait; may hold some that are gone
        self._prefilling: dict[int, Request] = {}  # running, with more than one token to compute
        self._steps_to_wait = 0  # before the first in the queue is looked at again
        self._is_short = False  # of pages, in this step: one that runs was preempted as another grew

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._prefilling) + len(self.rows)

    def check(self, prompt_length: int, max_length: int) -> None:
        """Raise RequestError for a request that the empty cache can't hold, however small its chunks are."""
        num_tokens = max_length - 1
        if not self._tables.can_hold(num_tokens, 1):
            raise RequestError(
                "prompt-too-large-for-cache",
                f"a prompt of {prompt_length} tokens and an answer of up to {max_length - prompt_length} are "
                f"{num_tokens} tokens to cache (the last is never cached): {self._tables.arithmetic(num_tokens)}",
                fix="lower max_tokens, shorten the prompt, or load with more cache_bytes",
            )

    def submit(self, request: Request) -> None:
        """Queue a request that `check` let through."""
        self._num_arrivals += 1
        request.arrival = self._num_arrivals
        self._enqueue(request)
        if self._first_waiting() is request:
            self._steps_to_wait = 0

    def remove(self, request: Request) -> None:
        """Forget a request that has ended or is cancelled, and give back its pages; its prefix stays known."""
        if self._first_waiting() is request:
            self._steps_to_wait = 0
        if self._waiting.pop(request.id, None) is None:
            self._stop(request)
        elif len(self._queue) > 2 * len(self._waiting) + MANY_GONE:
            self._queue = [entry for entry in self._queue if entry[1].id in self._waiting]
            heapq.heapify(self._queue)

    # --- a step --------------------------------------------------------------------------------------------------

    def schedule(self) -> Step:
        """The next step; empty only when nothing waits or runs. Takes pages and admits, but computes nothing."""
        self._steps_to_wait = max(0, self._steps_to_wait - 1)
        self._is_short = False
        self._grow_rows()
        chunks: list[ScheduledChunk] = []
        for request in sorted(self._prefilling.values(), key=lambda request: request.rank):
            if not self._is_short:
                self._admit_to(chunks, above=request.priority)
            # One that goes before it may have preempted it meanwhile.
            budget = self._budget(chunks)
            if budget and request.id in self._prefilling and (length := self._chunk(request, budget)):
                chunks.append(ScheduledChunk(request, length))
        if not self.num_running or not self._is_short:
            self._admit_to(chunks)
        step = Step(list(self.rows.requests), chunks)
        if self._prefixes is not None:
            step.saves.extend(self._prefixes.take_saves())
            for scheduled in chunks:
                step.restores.extend(self._prefixes.restores(scheduled.request))
        return step

    def complete(self, step: Step, token_ids: Sequence[int]) -> None:
        """The step is computed; `token_ids` are what was drawn for `step.sampled`. Nothing changed since `schedule`."""
        count = len(step.decodes)
        if self._prefixes is not None:
            self._prefixes.saved()
        if count:
            self.rows.advance(token_ids[:count])
            if self._restart_length is not None:
                for request in self.rows.of_length(self._restart_length):
                    self.rows.remove(request)
                    self._prefilling[request.id] = request
                    self._restart(request)
        drawn = iter(token_ids[count:])
        for scheduled in step.chunks:
            self._complete_chunk(scheduled.request, scheduled.length, next(drawn) if scheduled.samples else None)
        assert next(drawn, None) is None, "more tokens than sequences that sample"

    def abandon(self, step: Step) -> None:
        """The step failed. Pages are written again as they were, but states may have been changed: they start anew."""
        if not self._tables.plan.states:
            return
        if self._prefixes is not None:
            self._prefixes.drop_points()
        for request in [*step.decodes, *(scheduled.request for scheduled in step.chunks)]:
            self._stop(request, keep=False)
            self._enqueue(request)

    def _complete_chunk(self, request: Request, length: int, token_id: int | None) -> None:
        table = request.table
        assert table is not None
        request.num_computed += length
        if self._prefixes is not None:
            self._prefixes.restored(request)
            self._prefixes.register(request)
        self._tables.evict(table, request.num_computed)
        if token_id is None:
            return
        request.token_ids.append(token_id)
        if len(request.token_ids) == self._restart_length:
            self._restart(request)
        else:
            del self._prefilling[request.id]
            self.rows.add(request)

    def _restart(self, request: Request) -> None:
        """All tokens of a running request are to be computed anew, as those of a sequence of its present length."""
        self._give_back(request)
        request.table = self._tables.new_table()
        request.prefill_length = len(request.token_ids)
        request.digests.clear()

    # --- pages ---------------------------------------------------------------------------------------------------

    def make_room(self, table: SequenceTable, length: int) -> bool:
        """Let a table grow to `length` tokens, for which unused prefixes are given up; False: there is no room."""
        if not self._tables.can_grow(table, length) and not self._reclaim(self._tables.missing(table, length)):
            return False
        self._tables.grow(table, length)
        return True

    def _grow_rows(self) -> None:
        """Give each sequence that decodes a place for its token. Who finds none even so is preempted."""
        rows = self.rows
        rows.evict(self._tables)
        short = rows.short()
        if not short:
            return
        if self._reclaim({name: len(found) for name, found in short.items()}):
            rows.grow(self._tables, short)
            return
        lacking = {rows.requests[row].id: rows.requests[row] for found in short.values() for row in found.tolist()}
        for request in sorted(lacking.values(), key=lambda request: request.rank):
            # It may have been preempted for an older one, and be preempted itself.
            while request.row >= 0:
                assert request.table is not None
                if self.make_room(request.table, len(request.token_ids)):
                    rows.refresh(request.row)
                    break
                self._make_way()

    def _chunk(self, request: Request, budget: int) -> int:
        """How many tokens of a running request are computed; room is made for one at least. 0: it has to wait."""
        while not (length := self._fit(request, budget)):
            if self._last() is request and self.num_running > 1:
                return 0
            self._make_way()
            if request.id not in self._prefilling:
                return 0
        return length

    def _fit(self, request: Request, budget: int) -> int:
        """How many tokens of a running request fit the budget and the cache, while no other gives up pages.

        The pages are taken.
        """
        assert request.table is not None
        length = min(request.num_pending, budget)
        if not request.shares:
            # Nothing is given up for it: with larger chunks its windows could keep slabs that it needs later.
            length = min(length, self._tables.step_for(request.max_length - 1, self._max_num_tokens))
        length = self._aligned(request, length)
        while length and not self.make_room(request.table, request.num_cached + length):
            length //= 2
        return length

    def _aligned(self, request: Request, length: int) -> int:
        """Cut a chunk where its states are worth keeping: at the end of what was known, or of its last whole block.

        Of all known tokens the last one is in no such block: who begins with the same ones has to compute it.
        """
        if self._prefixes is None or not self._prefixes.has_states:
            return length
        block, start = self._prefixes.block, request.num_cached
        most = min(start + length, len(request.token_ids) - 1)
        for end in (request.shared_length, most // block * block):
            if start < end < start + length:
                return end - start
        return length

    def _reclaim(self, pages: Mapping[str, int]) -> bool:
        """Give up prefixes until so many pages by group can be had; False: all are given up, and it isn't enough."""
        while not self._tables.can_take(pages):
            if self._prefixes is None or not self._prefixes.drop_one():
                return False
        return True

    # --- who runs ------------------------------------------------------------------------------------------------

    def _budget(self, chunks: Sequence[ScheduledChunk]) -> int:
        """Tokens that the step can still compute."""
        return self._max_num_tokens - len(self.rows) - sum(scheduled.length for scheduled in chunks)

    def _admit_to(self, chunks: list[ScheduledChunk], *, above: int | None = None) -> None:
        """Admit who waits first, while there is room: all, or those of a priority `above`."""
        while (first := self._first_waiting()) is not None and (above is None or first.priority > above):
            # Where as many decode as a step has tokens, one of them may have to give up its place.
            if not self._budget(chunks) and len(self.rows) < self._max_num_tokens:
                break
            if not self._admit(first, chunks):
                break

    def _admit(self, request: Request, chunks: list[ScheduledChunk]) -> bool:
        """Let the request that waits first run, from its first chunk on; False: it has to wait on.

        Nobody in `chunks` is of a lower priority: those that are preempted for it have no chunk yet.
        """
        if self._steps_to_wait and self.num_running:
            return False
        if not self._join(request):
            if self.num_running:
                self._steps_to_wait = RETRY_STEPS
                return False
            self._start_alone(request, self._budget(chunks))
        length = self._fit(request, self._budget(chunks))
        assert length, f"request {request.id} doesn't fit the empty cache"
        heapq.heappop(self._queue)
        del self._waiting[request.id]
        self.num_tokens_reused += request.num_reused
        chunks.append(ScheduledChunk(request, length))
        return True

    def _join(self, request: Request) -> bool:
        """Start a request beside others. If need be those of a lower priority are preempted, the last ones first.

        False: it has to wait, or nobody else runs any more.
        """
        while others := self._running():
            lower = [other for other in others if other.priority < request.priority]
            if not request.shares or not others[0].shares:  # one of them is to be alone
                is_enough = len(lower) == len(others)
            else:
                has_place = len(others) < min(self._max_num_seqs, self._max_num_tokens)
                if not has_place and not lower:
                    return False
                self._start(request)
                if has_place and self._has_room(request):
                    return True
                is_enough = bool(lower) and self._is_enough(request, others, lower)
                self._stop(request)
            if not is_enough:
                return False
            self.preempt(max(lower, key=lambda other: other.rank))
        return False

    def _start_alone(self, request: Request, budget: int) -> None:
        """Start a request where no other runs."""
        if not request.shares:
            self._forget_prefixes()
        self._start(request)
        if not self._fit(request, budget):
            # What it shares may lie on too many slabs: it fits alone.
            self._stop(request, keep=False)
            self._forget_prefixes()
            self._start(request)

    def _has_room(self, request: Request) -> bool:
        """Whether all its known tokens fit, and those by which the others grow; prefixes are given up for them."""
        needed = self._needed(request, self.num_running)
        if self._tables.can_take(needed):
            return True
        # Before anything is given up in vain: not even all of it may be enough.
        freed = self._tables.by_pool({} if self._prefixes is None else self._prefixes.reclaimable())
        return self._tables.could_take(needed, freed) and self._reclaim(needed)

    def _is_enough(self, request: Request, others: Sequence[Request], lower: Sequence[Request]) -> bool:
        """Whether a started request could have room if those of `lower` were preempted; at best, as `could_take`."""
        if len(lower) == len(others):
            return True
        # What none of those that stay has can be had: prefixes are given up too.
        staying = [request, *(other for other in others if other.priority >= request.priority)]
        kept = self._tables.by_pool({name: _num_pages(staying, name) for name in self._tables.pool_of})
        freed = {name: pool.num_held - kept[name] for name, pool in self._tables.pools.items()}
        return self._tables.could_take(self._needed(request, len(staying)), freed)

    def _needed(self, request: Request, num_running: int) -> dict[str, int]:
        """Pages by group that a started request should find, as one of `num_running`."""
        assert request.table is not None
        return self._tables.with_growth(
            request.table, len(request.token_ids), self._max_num_tokens, num_running, GROWTH_TOKENS
        )

    def _first_waiting(self) -> Request | None:
        while self._queue and self._queue[0][1].id not in self._waiting:
            heapq.heappop(self._queue)
        return self._queue[0][1] if self._queue else None

    def _enqueue(self, request: Request) -> None:
        self._waiting[request.id] = request
        heapq.heappush(self._queue, (request.rank, request))

    def _last(self) -> Request:
        """The running request that is preempted first."""
        return max(self._running(), key=lambda request: request.rank)

    def _running(self) -> list[Request]:
        return [*self.rows.requests, *self._prefilling.values()]

    def _make_way(self) -> None:
        """Preempt the last of those that run; the only one has its pages on too many slabs, and is to run alone."""
        self._is_short = True
        last = self._last()
        if self.num_running == 1:
            assert last.shares, f"request {last.id} doesn't fit the empty cache"
            last.shares = False
        self.preempt(last)

    def preempt(self, request: Request) -> None:
        """Take a running request's pages; it waits to be computed again."""
        self.num_preemptions += 1
        self._stop(request)
        self._enqueue(request)

    def _start(self, request: Request) -> None:
        """Let a request run, behind what is known of its tokens."""
        request.table = self._tables.new_table()
        self._prefilling[request.id] = request
        if self._prefixes is not None:
            self._prefixes.adopt(request, self._prefixes.match(request))

    def _stop(self, request: Request, *, keep: bool = True) -> None:
        """Let it run no more. `keep`: what it computed stays known."""
        if request.row >= 0:
            self.rows.remove(request)
        else:
            del self._prefilling[request.id]
        self._give_back(request, keep=keep)
        self._steps_to_wait = 0

    def _give_back(self, request: Request, *, keep: bool = True) -> None:
        assert request.table is not None
        if self._prefixes is not None:
            if keep:
                self._prefixes.register(request)
            self._prefixes.leave(request)
        self._tables.release(request.table)
        request.table = None
        request.num_computed = request.num_reused = 0

    def _forget_prefixes(self) -> None:
        if self._prefixes is not None:
            self._prefixes.clear()


def _num_pages(requests: Sequence[Request], group: str) -> int:
    """Pages of the group that running requests hold, those that they share counted once."""
    return len({page for request in requests if request.table is not None for page in request.table.pages[group]})
