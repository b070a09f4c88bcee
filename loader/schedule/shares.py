"""Several ranks with sequences of their own under one scheduler: each rank's requests have a `Scheduler` of their own.

A request waits here until a rank has room for it, and goes to the one that has most free slabs once it is there; a
prefix that a rank knows counts as room. There it stays: its pages are that rank's. All ranks take part in each step,
each with its share of the tokens, and all shares are made as large as the largest.
"""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

from precast.loader.cache.prefixes import Prefixes
from precast.loader.cache.tables import PageTables, PoolUsage
from precast.loader.schedule.decoding import DecodeBatch
from precast.loader.schedule.requests import NO_TOKEN, Request, Sizes, Step
from precast.loader.schedule.scheduler import Scheduler

_rank_of = attrgetter("rank")


class Share(NamedTuple):
    """What one rank has: its pages, what is known there, and the scheduler of its requests."""

    tables: PageTables
    prefixes: Prefixes
    scheduler: Scheduler


class Shares:
    """As a `Scheduler`, for ranks that each have sequences of their own."""

    def __init__(self, shares: Sequence[Share], max_num_seqs: int) -> None:
        """`max_num_seqs` of each rank."""
        self._shares = shares
        self._max_num_seqs = max_num_seqs
        self._waiting: list[Request] = []  # for no rank yet, in the order of their ranks
        self._share_of: dict[int, Share] = {}
        self._arrivals = itertools.count(1)

    @property
    def decoding(self) -> list[DecodeBatch]:
        """The sequences that decode, by rank."""
        return [share.scheduler.decoding for share in self._shares]

    @property
    def most_decoding(self) -> int:
        """The most sequences that decode on one rank."""
        return max(map(len, self.decoding))

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + sum(share.scheduler.num_waiting for share in self._shares)

    @property
    def num_running(self) -> int:
        return sum(share.scheduler.num_running for share in self._shares)

    @property
    def num_preemptions(self) -> int:
        return sum(share.scheduler.num_preemptions for share in self._shares)

    @property
    def num_tokens_reused(self) -> int:
        return sum(share.scheduler.num_tokens_reused for share in self._shares)

    def check(self, prompt_length: int, max_length: int) -> None:
        """As `Scheduler.check`: all ranks have as many slabs."""
        self._shares[0].scheduler.check(prompt_length, max_length)

    def submit(self, request: Request) -> None:
        """As `Scheduler.submit`."""
        request.arrival = next(self._arrivals)
        insort(self._waiting, request, key=_rank_of)

    def remove(self, request: Request) -> None:
        """As `Scheduler.remove`."""
        share = self._share_of.pop(request.id, None)
        if share is not None:
            share.scheduler.remove(request)
            return
        index = bisect_left(self._waiting, request.rank, key=_rank_of)
        assert self._waiting[index] is request, f"request {request.id} neither waits nor runs"
        del self._waiting[index]

    # --- a step --------------------------------------------------------------------------------------------------

    def schedule_ahead(self) -> Step | None:
        """As `Scheduler.schedule_ahead`; None also where one rank has to wait for what is in flight."""
        self._place()
        steps = []
        for share in self._shares:
            step = share.scheduler.schedule_ahead()
            if step is None:
                return None  # what others have scheduled they schedule again
            steps.append(step)
        return _together(steps)

    def schedule(self) -> Step:
        """As `Scheduler.schedule`."""
        self._place()
        return _together([share.scheduler.schedule() for share in self._shares])

    def launched(self, step: Step) -> None:
        """As `Scheduler.launched`. Unknown tokens name rows of their own rank."""
        self._each(step, lambda scheduler, share: scheduler.launched(share))

    def arrived(self, step: Step, token_ids: Sequence[int]) -> None:
        """As `Scheduler.arrived`."""
        left = iter(token_ids)
        for share, own in zip(self._shares, step.shares, strict=True):
            drawn = list(itertools.islice(left, len(own.sampled)))
            share.scheduler.arrived(own, drawn)
            for request, token_id in zip(own.sampled, drawn, strict=True):
                if token_id == NO_TOKEN:
                    self._share_of.pop(request.id, None)

    def abandon(self, step: Step) -> None:
        """As `Scheduler.abandon`."""
        self._each(step, lambda scheduler, share: scheduler.abandon(share))

    def rollback(self, steps: Sequence[Step]) -> None:
        """As `Scheduler.rollback`."""
        for rank, share in enumerate(self._shares):
            share.scheduler.rollback([step.shares[rank] for step in steps])

    def _each(self, step: Step, call: Callable[[Scheduler, Step], object]) -> None:
        for share, own in zip(self._shares, step.shares, strict=True):
            call(share.scheduler, own)

    # --- which rank ----------------------------------------------------------------------------------------------

    def _place(self) -> None:
        """Give requests to ranks, those that go first first, as long as a rank takes the next one."""
        while self._waiting:
            request = self._waiting[0]
            left = [(self._slabs_left(share, request), share) for share in self._shares]
            open_to = [(slabs, -rank) for rank, (slabs, share) in enumerate(left) if self._takes(share, request, slabs)]
            if not open_to:
                return
            _, rank = max(open_to)
            share = self._share_of[request.id] = self._shares[-rank]
            self._waiting.pop(0)
            share.scheduler.submit(request)

    def _takes(self, share: Share, request: Request, slabs_left: int) -> bool:
        """Whether a rank would look at the request next, or has a place and pages for it beside all that it has."""
        scheduler = share.scheduler
        if all(request.priority > waiting.priority for waiting in scheduler.waiting):
            return True
        return slabs_left >= 0 and scheduler.num_running + scheduler.num_waiting < self._max_num_seqs

    def _slabs_left(self, share: Share, request: Request) -> int:
        """The free slabs of a rank once the request, and those that wait there, have pages for what is known of them;
        below 0: so many lack. What is only kept for reuse counts as free."""
        tables, match = share.tables, share.prefixes.match(request)
        needed = Counter(tables.missing(match.table, len(request.token_ids)))
        for waiting in share.scheduler.waiting:
            needed.update(tables.missing(tables.new_table(), len(waiting.token_ids)))
        return tables.slabs_left(needed, tables.by_pool(share.prefixes.reclaimable(match)))


def _together(steps: Sequence[Step]) -> Step:
    """The step of all ranks: their shares, made as large as the largest of each kind."""
    sizes = Sizes(
        max(1, *(step.num_tokens for step in steps)),
        max(1, *(len(step.requests) for step in steps)),
        max(1, *(len(step.sampled) for step in steps)),
    )
    shares = [dataclasses.replace(step, sizes=sizes) for step in steps]
    return Step(
        [request for step in steps for request in step.decodes], [chunk for step in steps for chunk in step.chunks],
        sizes=sizes, shares=shares,
    )  # fmt: skip


def usage_of(shares: Sequence[Share]) -> dict[str, PoolUsage]:
    """All ranks' pools, by name, as one."""
    each = [share.tables.usage(share.prefixes.reclaimable()) for share in shares]
    return {
        name: PoolUsage(*(sum(getattr(usage[name], field) for usage in each) for field in PoolUsage.__struct_fields__))
        for name in each[0]
    }
