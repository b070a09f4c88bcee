"""The logits of a whole prompt, beside the requests that run: `Engine.logits`."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from precast.ir.errors import RequestError
from precast.loader.cache.prefixes import Prefixes
from precast.loader.cache.tables import PageTables
from precast.loader.run.steps import StepRunner
from precast.loader.schedule.requests import Chunk, Request, Step
from precast.loader.schedule.scheduler import Scheduler

if TYPE_CHECKING:
    import torch


def prompt_logits(
    ids: array[int], runner: StepRunner, tables: PageTables, prefixes: Prefixes, scheduler: Scheduler
) -> torch.Tensor:
    """`[T, V]` float32, computed in steps of its own: of the engine, `_advance` and this alone call `Runner.launch`.

    Raises RequestError for a prompt that needs more pages than the cache has, or than running requests leave.
    """
    found = f"the prompt's {len(ids)} tokens don't fit the cache: {tables.arithmetic(len(ids))}"
    if not tables.can_hold(len(ids), 1):
        raise RequestError("prompt-too-large-for-cache", found, fix="load with larger cache_bytes")
    request = Request(0, ids, len(ids) + 1)
    table = request.table = tables.new_table()
    most = tables.step_for(len(ids), min(runner.limits.max_num_seqs, runner.limits.max_num_tokens))
    import torch  # of the backend whose steps give logits as tensors

    result = torch.empty(0)
    try:
        while request.num_pending:
            start, length = request.num_computed, min(request.num_pending, most)
            while not scheduler.grow_or_reclaim(table, start + length):
                if length == 1:
                    found += f", {tables.arena.num_free} free"
                    raise RequestError("cache-too-small", found, fix="let the running requests end first")
                length //= 2
            # States that the next step would save first: others write to their pages now.
            runner.copy_pages(prefixes.take_saves())
            prefixes.saved()
            rows = runner.launch(Step([], [Chunk(request, length, "all")])).logits
            assert rows is not None, "a step that draws nothing gives its logits"
            if start == 0:
                result = torch.empty(len(ids), rows.shape[-1], dtype=torch.float32, device=rows.device)
            result[start : start + length] = rows
            request.num_pending -= length
            tables.evict(table, request.num_computed)
    finally:
        tables.release(table)
    return result
