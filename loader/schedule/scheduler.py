"""Which tokens of which sequences each step computes: continuous batching with chunked prefill.

A step has a budget of tokens. Sequences that decode come first, one token each; what is left goes to prompts, those of
the highest priority and the oldest first, cut to the budget; while some is left, waiting requests are admitted in the
same order. So nobody is overtaken, and only for a higher priority is a request admitted in a step in which one that
runs has no token. Where sequences decode, the budget of prompts may be smaller, so that they wait less for a step.

A sequence gets pages as it grows, nothing is reserved for its answer. When one can't grow, prefixes that nobody uses
are given up, and then running requests are preempted: the lowest priority first, the youngest of it. They wait at
the head of their priority and are computed again. A request that waits takes places and pages too, but only from
those of a strictly lower priority, so nobody is preempted by those that it was preempted for. The oldest request of the
highest priority is never preempted for others, and what `check` let through fits the cache alone, so it always goes on.

A step can be scheduled before the tokens of those launched before it are known (`launched`, `arrived`): a sequence then
has unknown tokens at its end. Nobody is preempted meanwhile, and nobody is computed anew.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter

from precast.ir.errors import RequestError
from precast.loader.cache.prefixes import Match, Prefixes
from precast.loader.cache.sequence import expect_tokens, learn_tokens
from precast.loader.cache.tables import PageTables, SequenceTable
from precast.loader.schedule.decoding import DecodeBatch
from precast.loader.schedule.requests import NO_TOKEN, Chunk, Request, Step

GROWTH_TOKENS = 32
"""Tokens by which each sequence that runs should be able to grow when another is admitted; a page, if that is less."""
RETRY_STEPS = 16
"""A request that found no room is looked at again when another ends, or after so many steps."""

_rank_of = attrgetter("rank")


class _Unsettled(Exception):
    """What is to be scheduled depends on what is in flight."""


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
        most_beside: Callable[[int], int] | None = None,
    ) -> None:
        """A sequence that grows to `restart_length` tokens is computed anew, from its first token.

        `prefixes` of the same tables; None: nothing is reused. `most_beside` gives the most tokens of prompts in a step
        in which so many sequences decode, and not 0 for ever; None: as many as the step has.
        """
        self.decoding = DecodeBatch(tables.plan, max_num_seqs)
        self.num_preemptions = 0
        self.num_tokens_reused = 0
        self._tables = tables
        self._prefixes = Prefixes(tables, reuses=False) if prefixes is None else prefixes
        self._restart_length = restart_length
        self._max_num_seqs = max_num_seqs
        self._max_num_tokens = max_num_tokens
        self._most_beside = most_beside
        self._most_prefilled = max_num_tokens  # in this step, while sequences decode in it
        self._arrivals = itertools.count(1)
        self._waiting: list[Request] = []  # in the order of their ranks
        self._chunked: dict[int, Request] = {}  # running, computed in chunks: prompts, and what restarts
        self._steps_to_wait = 0  # before the first in the queue is looked at again
        self._held: dict[int, Request] = {}  # their last token is in flight: to end, or to be computed anew
        self._in_flight = 0  # steps that were launched and have not arrived
        self._is_short = False  # of pages, in this step: one that runs was preempted as another grew

    @property
    def waiting(self) -> Sequence[Request]:
        """The requests that wait, in the order of their ranks."""
        return self._waiting

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def most_decoding(self) -> int:
        """How many sequences decode."""
        return len(self.decoding)

    @property
    def num_running(self) -> int:
        return len(self._chunked) + len(self.decoding) + len(self._held)

    def check(self, prompt_length: int, max_length: int) -> None:
        """Raise RequestError for a request that the empty cache can't hold, however small its chunks are."""
        num_tokens = max_length - 1
        if not self._tables.can_hold(num_tokens, 1):
            raise RequestError(
                "prompt-too-large-for-cache",
                f"a prompt of {prompt_length} tokens and an answer of up to {max_length - prompt_length} are "
                f"{num_tokens} tokens to cache (the last is never cached): {self._tables.arithmetic(num_tokens)}",
                fix="lower max_tokens, shorten the prompt, or load with larger cache_bytes",
            )

    def submit(self, request: Request) -> None:
        """Queue a request that `check` let through."""
        request.arrival = next(self._arrivals)
        self._enqueue(request)
        if self._waiting[0] is request:
            self._steps_to_wait = 0

    def remove(self, request: Request) -> None:
        """Forget a request that has ended or is cancelled, and give back its pages; its prefix stays known.

        What a step in flight draws for it is nobody's.
        """
        if self._runs(request):
            self._stop(request)
            request.forget_unknown()
            return
        index = bisect_left(self._waiting, request.rank, key=_rank_of)
        assert self._waiting[index] is request, f"request {request.id} neither waits nor runs"
        del self._waiting[index]
        if index == 0:
            self._steps_to_wait = 0

    # --- a step --------------------------------------------------------------------------------------------------

    def schedule_ahead(self) -> Step | None:
        """The next step while others are in flight. None: these must arrive first.

        That is where somebody has to give up pages or a place: what is in flight may end, and free them.
        """
        try:
            return self.schedule()
        except _Unsettled:
            return None

    def schedule(self) -> Step:
        """The next step; empty only when nothing waits or runs but what ends with a step in flight.

        Takes pages and admits, but computes nothing. With steps in flight: `schedule_ahead`.
        """
        self._steps_to_wait = max(0, self._steps_to_wait - 1)
        self._is_short = False
        self._grow_decoding()
        self._most_prefilled = self._max_num_tokens
        if self._most_beside is not None and len(self.decoding) and (self._chunked or self._waiting):
            self._most_prefilled = self._most_beside(len(self.decoding))
        chunks: list[Chunk] = []
        for request in sorted(self._chunked.values(), key=_rank_of):
            if not self._is_short:
                self._admit_to(chunks, above=request.priority)
            # One that goes before it may have preempted it meanwhile.
            budget = self._budget(chunks)
            if budget and request.id in self._chunked and (length := self._chunk_length(request, budget)):
                chunks.append(Chunk(request, length))
        if not self.num_running or not self._is_short:
            self._admit_to(chunks)
        restores = [copy for chunk in chunks for copy in self._prefixes.restores(chunk.request)]
        return Step(list(self.decoding.requests), chunks, self._prefixes.take_saves(), restores)

    def launched(self, step: Step) -> None:
        """The step will be computed: its requests go on as if it were. Nothing changed since `schedule`.

        Each of `step.sampled` has one token more, unknown until `arrived`. Steps arrive in the order of their launch.
        """
        self._in_flight += 1
        self._prefixes.saved()
        if step.decodes:
            self.decoding.advance()
            for request in self.decoding.full():
                self.decoding.remove(request)
                self._held[request.id] = request
            if self._restart_length is not None:
                for request in self.decoding.of_length(self._restart_length):
                    self.decoding.remove(request)
                    self._held[request.id] = request
        rows = itertools.count(len(step.decodes))
        for chunk in step.chunks:
            self._launched_chunk(chunk, next(rows) if chunk.samples else None)

    def arrived(self, step: Step, token_ids: Sequence[int]) -> None:
        """What the first of the launched steps has drawn: `token_ids` for `step.sampled`.

        A request that got `NO_TOKEN` is removed: its caches may hold what is no number, so nothing of it is reused.
        """
        self._in_flight -= 1
        sampled = step.sampled
        learn_tokens(sampled, token_ids)
        failed = []
        if NO_TOKEN in token_ids:
            failed = [request for request, token in zip(sampled, token_ids, strict=True) if token == NO_TOKEN]
        for request in failed:  # before anything of it becomes known
            self._prefixes.withdraw(request)
        for request in failed:
            if self._runs(request):
                self.remove(request)
                request.token_ids.pop()
        if not self._in_flight:  # else each that decodes has a token in flight, and stays unknown
            self.decoding.learn(sampled)
        for chunk in step.chunks:
            if chunk.samples and self._runs(chunk.request):
                self._prefixes.prove(chunk.request)
        for request in [request for request in self._held.values() if self._is_to_restart(request)]:
            del self._held[request.id]
            self._chunked[request.id] = request
            self._restart(request)

    def complete(self, step: Step, token_ids: Sequence[int]) -> None:
        """The step is launched and has arrived: for whoever looks at one step at a time."""
        self.launched(step)
        self.arrived(step, token_ids)

    def abandon(self, step: Step) -> None:
        """The step was not launched. Pages are written again as they were, but states may have been changed: they
        start anew. What was launched before has arrived.
        """
        assert not self._in_flight
        if not self._tables.plan.states:
            return
        self._prefixes.drop_points()
        self._start_anew([*step.decodes, *(chunk.request for chunk in step.chunks)])

    def rollback(self, steps: Sequence[Step]) -> None:
        """Launched steps that will not arrive: their requests go back to what is known, and are computed anew.

        What was kept for reuse is given up: it may be what these steps were to write.
        """
        self._in_flight = 0
        self._start_anew([request for step in steps for request in step.requests])
        self._prefixes.clear()

    def _start_anew(self, requests: Iterable[Request]) -> None:
        for request in dict.fromkeys(requests):
            if self._runs(request):
                self._stop(request, keep=False)
                request.forget_unknown()
                request.num_computed = 0
                self._enqueue(request)

    def _is_to_restart(self, request: Request) -> bool:
        return request.num_known == len(request.token_ids) == self._restart_length

    def _launched_chunk(self, chunk: Chunk, row: int | None) -> None:
        request = chunk.request
        request.num_pending -= chunk.length
        self._prefixes.restored(request)
        self._prefixes.register(request)
        self._tables.evict(request.table, request.num_computed)
        if row is None:
            return
        expect_tokens([request], row)
        request.num_pending += 1
        del self._chunked[request.id]
        if len(request.token_ids) in (self._restart_length, request.max_length):
            self._held[request.id] = request
        else:
            self.decoding.add(request)

    def _restart(self, request: Request) -> None:
        """All tokens of a running request are to be computed anew, as those of a sequence of its present length."""
        self._release(request)
        request.prefill_length = len(request.token_ids)
        request.digests.clear()

    # --- pages ---------------------------------------------------------------------------------------------------

    def grow_or_reclaim(self, table: SequenceTable, length: int) -> bool:
        """Take the pages for `length` tokens; unused prefixes are given up for them. False: nothing is taken."""
        if not self._drop_prefixes_for(self._tables.missing(table, length)):
            return False
        self._tables.grow(table, length)
        return True

    def _grow_decoding(self) -> None:
        """Take a page for each sequence that decodes and has no place for its token, preempting if none is left."""
        decoding = self.decoding
        decoding.evict(self._tables)
        short = decoding.short()
        if not short:
            return
        if self._drop_prefixes_for({name: len(found) for name, found in short.items()}):
            decoding.grow(self._tables, short)
            return
        lacking = {i: decoding.requests[i] for found in short.values() for i in found.tolist()}
        for request in sorted(lacking.values(), key=_rank_of):
            # It may have been preempted for an older one, and be preempted itself.
            while request.is_decoding:
                if self.grow_or_reclaim(request.table, len(request.token_ids)):
                    decoding.refresh(request.decode_index)
                    break
                self._preempt_last()

    def _chunk_length(self, request: Request, budget: int) -> int:
        """Take pages for a running request's next chunk, preempting others if need be; its length, 0: it waits."""
        while not (length := self._take_pages_for(request, budget)):
            if self._last() is request and self.num_running > 1:
                return 0
            self._preempt_last()
            if request.id not in self._chunked:
                return 0
        return length

    def _take_pages_for(self, request: Request, budget: int) -> int:
        """Take pages for as many tokens as fit the budget and the cache, preempting nobody; how many. 0: none fits."""
        length = min(request.num_pending, budget)
        if request.runs_alone:
            # Nothing is given up for it: with larger chunks its windows could keep slabs that it needs later.
            length = min(length, self._tables.step_for(request.max_length - 1, self._max_num_tokens))
        length = self._aligned(request, length)
        while length and not self.grow_or_reclaim(request.table, request.num_computed + length):
            length //= 2
        return length

    def _aligned(self, request: Request, length: int) -> int:
        """Cut a chunk where its states are worth keeping: at the end of what was known, or of its last whole span.

        Of all known tokens the last one is in no such span: who begins with the same ones has to compute it.
        """
        if not self._prefixes.has_states:
            return length
        span, start = self._prefixes.span_tokens, request.num_computed
        most = min(start + length, len(request.token_ids) - 1)
        for end in (request.shared_length, most // span * span):
            if start < end < start + length:
                return end - start
        return length

    def _drop_prefixes_for(self, pages: Mapping[str, int], keep: Match | None = None) -> bool:
        """Drop unused prefixes until so many pages by group are free; False: all are dropped, and it isn't enough.

        What `keep` needs is not dropped.
        """
        while not self._tables.can_take(pages):
            if not self._prefixes.drop_one(keep):
                return False
        return True

    # --- who runs ------------------------------------------------------------------------------------------------

    def _budget(self, chunks: Sequence[Chunk]) -> int:
        """Tokens that the step can still compute, of prompts."""
        taken = sum(chunk.length for chunk in chunks)
        left = self._max_num_tokens - len(self.decoding) - taken
        return min(left, self._most_prefilled - taken) if len(self.decoding) else left

    def _admit_to(self, chunks: list[Chunk], *, above: int | None = None) -> None:
        """Admit who waits first, while there is room: all, or those of a priority `above`."""
        while self._waiting and (above is None or self._waiting[0].priority > above):
            # Where as many decode as a step has tokens, one of them may have to give up its place.
            is_full = len(self.decoding) == self._max_num_tokens and self._most_prefilled
            if not self._budget(chunks) and not is_full:
                break
            if not self._admit(self._waiting[0], chunks):
                break

    def _admit(self, request: Request, chunks: list[Chunk]) -> bool:
        """Let the request that waits first run, from its first chunk on; False: it has to wait on.

        Nobody in `chunks` is of a lower priority: those that are preempted for it have no chunk yet.
        """
        if self._steps_to_wait and self.num_running:
            return False
        match = self._join(request)
        if match is None:
            if self.num_running:
                self._steps_to_wait = RETRY_STEPS
                return False
            match = self._alone(request)
        self._prefixes.start(request, match)
        self._chunked[request.id] = request
        length = self._take_pages_for(request, self._budget(chunks))
        assert length, f"request {request.id} doesn't fit the empty cache"
        self._waiting.remove(request)
        self.num_tokens_reused += request.num_reused
        chunks.append(Chunk(request, length))
        return True

    def _join(self, request: Request) -> Match | None:
        """What a request can start from beside others. None: it has to wait, or nobody else runs any more.

        If need be those of a lower priority are preempted, the last ones first. Room is made by then.
        """
        while others := self._running():
            lower = [other for other in others if other.priority < request.priority]
            if request.runs_alone or others[0].runs_alone:
                is_enough = len(lower) == len(others)
            else:
                has_place = self.num_running < min(self._max_num_seqs, self._max_num_tokens)
                if not has_place and not lower:
                    return None
                match = self._match(request)
                needed = self._needed(request, match, len(others))
                # Asked before anything is given up: at best all that no sequence uses is.
                freed = self._tables.by_pool(self._prefixes.reclaimable(match))
                if has_place and self._tables.can_take(needed, freed) and self._drop_prefixes_for(needed, match):
                    return match
                is_enough = bool(lower) and self._would_fit_without(request, match, lower)
            if not is_enough:
                return None
            self.preempt(max(lower, key=_rank_of))
        return None

    def _alone(self, request: Request) -> Match:
        """What a request can start from where no other runs. Room is made for its first token."""
        if request.runs_alone:
            self._prefixes.clear()
        match = self._match(request)
        if not self._drop_prefixes_for(self._tables.missing(match.table, match.length + 1), match):
            # What it would share lies on too many slabs: it fits alone.
            self._prefixes.clear()
            match = self._match(request)
        return match

    def _match(self, request: Request) -> Match:
        """What the request could go on from, which is given up last from now on: it will be wanted."""
        match = self._prefixes.match(request)
        self._prefixes.touch(match)
        return match

    def _would_fit_without(self, request: Request, match: Match, lower: Sequence[Request]) -> bool:
        """Whether a request could have what it needs if those of `lower` were preempted and all prefixes given up."""
        staying = [other for other in self._running() if other.priority >= request.priority]
        if not staying:
            return True
        # What none of those that stay has can be had.
        tables = [match.table, *(other.table for other in staying)]
        held = {name: len({page for table in tables for page in table.pages[name]}) for name in self._tables.pool_of}
        kept = self._tables.by_pool(held)
        freed = {name: pool.num_held - kept[name] for name, pool in self._tables.pools.items()}
        return self._tables.can_take(self._needed(request, match, len(staying)), freed)

    def _needed(self, request: Request, match: Match, num_others: int) -> dict[str, int]:
        """Pages by group that a request should find where it starts: for its known tokens, and for all to grow.

        `num_others` run beside it.
        """
        length = len(request.token_ids)
        return self._tables.with_growth(match.table, length, self._max_num_tokens, num_others + 1, GROWTH_TOKENS)

    def _enqueue(self, request: Request) -> None:
        insort(self._waiting, request, key=_rank_of)

    def _last(self) -> Request:
        """The running request that is preempted first."""
        return max(self._running(), key=_rank_of)

    def _runs(self, request: Request) -> bool:
        return request.is_decoding or request.id in self._chunked or request.id in self._held

    def _running(self) -> list[Request]:
        return [*self.decoding.requests, *self._chunked.values()]

    def _preempt_last(self) -> None:
        """Preempt the last of those that run; the only one has its pages on too many slabs, and is to run alone."""
        if self._in_flight:
            raise _Unsettled
        self._is_short = True
        last = self._last()
        if self.num_running == 1:
            assert not last.runs_alone, f"request {last.id} doesn't fit the empty cache"
            last.run_alone()
        self.preempt(last)

    def preempt(self, request: Request) -> None:
        """Take a running request's pages; it waits to be computed again."""
        if self._in_flight:
            raise _Unsettled
        self.num_preemptions += 1
        self._stop(request)
        self._enqueue(request)

    def _stop(self, request: Request, *, keep: bool = True) -> None:
        """Let it run no more. `keep`: what it computed stays known."""
        if request.is_decoding:
            self.decoding.remove(request)
        else:
            del (self._chunked if request.id in self._chunked else self._held)[request.id]
        self._release(request, keep=keep)
        self._steps_to_wait = 0

    def _release(self, request: Request, *, keep: bool = True) -> None:
        """Give back its pages and its prefix, which stays known if `keep`."""
        if keep:
            self._prefixes.register(request)
        self._prefixes.leave(request)
        self._tables.release(request.table)
        request.num_computed = request.num_reused = 0
