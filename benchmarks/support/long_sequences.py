"""How many long sequences run at once: Gemma 3 12B, 32,768 tokens each, 102.48 GiB of cache, chunks of 8,192 tokens.

Of the 32,768 tokens 512 are the answer, so that the first sequence still runs when the last is admitted, and all are
nearly at their full length together. Beside it what vLLM's arithmetic at start gives: it divides memory by what a
sequence needs at most, of which window layers keep the window and a whole step's tokens, in blocks of 16 tokens. With
its default of 16,384 tokens a step that is the 14.0 that vLLM 0.25.1 reports on an H200.
"""

from __future__ import annotations

from array import array
from typing import Any

from precast.ir.graph.schema import CachePlan
from precast.ir.memory import caches
from precast.loader.cache.arena import Arena
from precast.loader.cache.tables import PageTables
from precast.loader.schedule.requests import Request
from precast.loader.schedule.scheduler import Scheduler
from support import cache_baselines
from support.cache_simulation import MAX_NUM_TOKENS

CACHE_BYTES = round(102.48 * 2**30)
LENGTH, ANSWER = 32_768, 512
NUM_REQUESTS = 60


def measure_long_sequences(plan: CachePlan) -> dict[str, Any]:
    """The most that run at once without a preemption, by system, beside the arithmetic."""
    limit = CACHE_BYTES // sum(caches.visible_bytes(group, LENGTH - 1) for group in caches.groups(plan))
    uniform, one_table = cache_baselines.uniform_plan(plan), cache_baselines.one_table_plan(plan)
    assert one_table is not None
    return {
        "arithmetic limit": limit,
        "precast": most_at_once(plan, limit),
        "uniform pages": most_at_once(uniform, limit),
        "one table": most_at_once(one_table, limit),
        "vLLM's arithmetic at start, by tokens a step": {
            step: uniform_at_start(uniform, CACHE_BYTES, step) for step in (8_192, 16_384)
        },
    }


def most_at_once(plan: CachePlan, limit: int) -> dict[str, int]:
    """The run with the most sequences at once of those in which nobody was preempted."""
    runs = (run(plan, most) for most in range(limit, 0, -1))
    return next(found for found in runs if not found["preemptions"])


def run(plan: CachePlan, max_num_seqs: int) -> dict[str, int]:
    """Serve all requests, of which up to `max_num_seqs` run at once."""
    tables = PageTables(plan, Arena(CACHE_BYTES // plan.slab_bytes))
    scheduler = Scheduler(tables, max_num_seqs=max_num_seqs, max_num_tokens=MAX_NUM_TOKENS)
    for number in range(NUM_REQUESTS):
        scheduler.check(LENGTH - ANSWER, LENGTH)
        scheduler.submit(Request(number, array("q", bytes(8 * (LENGTH - ANSWER))), LENGTH))
    most = num_steps = num_finished = 0
    while num_finished < NUM_REQUESTS:
        step = scheduler.schedule()
        most = max(most, scheduler.num_running)
        sampled = step.sampled
        scheduler.complete(step, [0] * len(sampled))
        num_steps += 1
        for request in sampled:
            if len(request.token_ids) == LENGTH:
                scheduler.remove(request)
                num_finished += 1
    return {
        "most at once": most,
        "preemptions": scheduler.num_preemptions,
        "steps until all had ended": num_steps,
    }


def uniform_at_start(uniform: CachePlan, cache_bytes: int, step: int) -> float:
    """How many sequences vLLM says to fit: blocks of all by those of one at most, a block more for each window."""
    blocks = 0
    for group in uniform.groups:
        size, window = group.spec.page_size, group.spec.window
        tokens = LENGTH if window is None else min(window - 1 + step, LENGTH)
        blocks += -(-tokens // size) + (window is not None)
    return round(cache_bytes / uniform.slab_bytes / blocks, 1)
