"""A server without a model: the real scheduler, tables, pools and prefixes under an endless workload, step by step.

What is counted, while a step is computed, which is when memory is needed:

- **needed** bytes: tokens that some query of the step sees, or one of the next for sequences that wait for a step,
  and the states of all that run. Tokens that the step writes count.
- **allocated** bytes: the slabs that pools have drawn.
- **reusable** bytes, only with prefix reuse: pages that no running sequence holds, kept for those that may come. They
  are full. They are given up as soon as a sequence needs pages, so they are no waste, and no need either.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Mapping

from precast.ir.graph.schema import CachePlan
from precast.ir.memory import caches
from precast.loader.cache.prefixes import Prefixes
from precast.loader.cache.tables import PageTables
from precast.loader.schedule.requests import Request, Step
from precast.loader.schedule.scheduler import Scheduler

MAX_NUM_SEQS = 8192
"""More than any memory here holds."""
MAX_NUM_TOKENS = 8192
BACKLOG = 8
"""Requests that wait at all times."""
SAMPLE_STEPS = 16
RAMP, MEASURED = 2, 4
"""Generations of requests: as many have to end as the most that ran at once, so many times."""


@dataclasses.dataclass(frozen=True)
class System:
    """Tables under test. `plan` is the model's own, by which needs count; `slab_bytes` by pool of the tables."""

    name: str
    plan: CachePlan
    tables: PageTables
    slab_bytes: Mapping[str, int]
    cache_bytes: int

    @property
    def allocated(self) -> int:
        return sum(pool.num_slabs * self.slab_bytes[name] for name, pool in self.tables.pools.items())


class Server:
    """One system that serves a stream of requests, of which some always wait."""

    def __init__(self, system: System, requests: Iterator[Request], *, reuses: bool = False) -> None:
        self.system = system
        self.prefixes = Prefixes(system.tables) if reuses else None
        self.scheduler = Scheduler(
            system.tables, max_num_seqs=MAX_NUM_SEQS, max_num_tokens=MAX_NUM_TOKENS, prefixes=self.prefixes
        )
        self.num_finished = 0
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.requests: dict[int, Request] = {}
        self._stream = requests

    def schedule(self) -> Step:
        """The next step; its pages are taken."""
        while self.scheduler.num_waiting < BACKLOG and (request := next(self._stream, None)) is not None:
            self.scheduler.check(request.prompt_length, request.max_length)
            self.scheduler.submit(request)
            self.requests[request.id] = request
            self.num_prompt_tokens += request.prompt_length
        return self.scheduler.schedule()

    def complete(self, step: Step) -> None:
        """Each request that samples gets a token; those that have all of theirs leave."""
        sampled = step.sampled
        self.scheduler.complete(step, [0] * len(sampled))
        self.num_steps += 1
        for request in sampled:
            if len(request.token_ids) == request.max_length:
                self.scheduler.remove(request)
                del self.requests[request.id]
                self.num_finished += 1

    def running(self) -> list[Request]:
        return [request for request in self.requests.values() if any(request.table.pages.values())]


def needed_bytes(plan: CachePlan, spans: Iterable[tuple[int, int]]) -> int:
    """Bytes that queries from the first position of a span on see, up to the span's end; states once a span."""
    spans = list(spans)
    total = len(spans) * sum(map(caches.state_bytes, plan.states))
    for group in plan.groups:
        spec = group.spec
        total += sum(end - caches.first_visible(spec, begin) for begin, end in spans) * caches.token_bytes(group)
    return total


def spans(server: Server, step: Step) -> list[tuple[int, int]]:
    """Of each running request: the first position that the step computes, and the end of what is cached then."""
    lengths = {scheduled.request.id: scheduled.length for scheduled in step.chunks}
    lengths |= dict.fromkeys((request.id for request in step.decodes), 1)
    return [(r.num_computed, r.num_computed + lengths.get(r.id, 0)) for r in server.running()]


@dataclasses.dataclass(frozen=True)
class Sample:
    """One step's bytes. `needed` counts a shared token once."""

    running: int
    needed: int
    reusable: int
    allocated: int
    in_pages: int
    """Bytes of the pages that are held."""


def sample(server: Server, step: Step, *, reuses: bool) -> Sample:
    system, found = server.system, spans(server, step)
    filled = {group.name: caches.filled_bytes(group) for group in caches.groups(system.plan)}
    needed, reusable = needed_bytes(system.plan, found), 0
    in_pages = 0
    for group in system.tables.groups:
        in_pages += system.tables.pool_of[group.name].num_held * filled.get(group.name, 0)
    if reuses:
        # Pages are shared: bytes of running sequences are those of their pages, less what is not seen of them.
        tables = [request.table for request in server.running()]
        held = own = 0
        for group in system.tables.groups:
            lists = [table.pages[group.name] for table in tables]
            unique = len(set().union(*lists))
            own += unique * filled[group.name]
            held += sum(map(len, lists)) * filled[group.name]
        reusable = in_pages - own
        needed = own - (held - needed)
    return Sample(len(found), needed, reusable, system.allocated, in_pages)


def simulate(system: System, requests: Iterator[Request], *, reuses: bool = False) -> dict[str, float]:
    """Shares and counts in steady state: behind the ramp, while requests keep coming."""
    server = Server(system, requests, reuses=reuses)
    most, samples, begun = 1, [], (0, 0, 0)
    while server.num_finished < (RAMP + MEASURED) * most:
        step = server.schedule()
        is_steady = server.num_finished >= RAMP * most
        if not is_steady:
            most = max(most, server.scheduler.num_running)
            begun = server.num_steps, server.num_finished, server.scheduler.num_preemptions
        elif server.num_steps % SAMPLE_STEPS == 0:
            samples.append(sample(server, step, reuses=reuses))
        server.complete(step)
    finished = server.num_finished - begun[1]
    found = {
        "sequences at once": statistics.fmean(one.running for one in samples),
        "useful, % of allocated": _share(samples, "allocated"),
        "useful, % of allocated, least": 100 * min((one.needed + one.reusable) / one.allocated for one in samples),
        "useful, % of the arena": 100 * statistics.fmean(one.needed + one.reusable for one in samples)
        / system.cache_bytes,
        "preemptions a finished request": (server.scheduler.num_preemptions - begun[2]) / finished,
        "finished": finished,
        "steps": server.num_steps - begun[0],
    }  # fmt: skip
    if any(one.in_pages for one in samples):
        found["useful, % of pages in use"] = _share(samples, "in_pages")
    if reuses:
        found["reusable, % of allocated"] = 100 * statistics.fmean(one.reusable / one.allocated for one in samples)
        found["reused, % of prompt tokens"] = 100 * server.scheduler.num_tokens_reused / server.num_prompt_tokens
    return {name: round(value, 2) for name, value in found.items()}


def _share(samples: list[Sample], whole: str) -> float:
    """The mean share of useful bytes in %: needed and reusable."""
    return 100 * statistics.fmean((one.needed + one.reusable) / getattr(one, whole) for one in samples)
