"""Claim: at least 97 % of the cache bytes that are allocated are useful, and more sequences fit the same memory.

Six published geometries under three workloads, with the cache plan that the builder makes, in the memory that H200s
leave beside the weights: the real allocators, tables, prefixes and scheduler, no tensors
(`support/cache_simulation.py` says what counts as useful). Beside it, in the same run, the same requests and bytes
under uniform pages, under one table for all layers, and under a static split (`support/cache_baselines.py`); the split
is made for the mixed workload. The claim is without prefix reuse; figures with reuse stand beside it.

Then sequences of 32,768 tokens of Gemma 3 12B in 102.48 GiB, the memory in which vLLM 0.25.1 says at start that 14.0
of them fit, with chunks of 8,192 tokens.

    python benchmarks/bench_caches.py [--plans DIR] [--shapes NAME ...] [--out FILE]

Nothing here is timed: the figures don't depend on the machine.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from support import cache_baselines, cache_geometries, harness, workloads
from support.cache_simulation import MAX_NUM_TOKENS, System, simulate
from support.long_sequences import measure_long_sequences

from precast.ir.graph.schema import CachePlan
from precast.ir.memory import caches
from precast.loader.cache.arena import Arena
from precast.loader.cache.tables import PageTables

OURS, REUSE, UNIFORM, ONE_TABLE, SPLIT = "precast", "precast, reuse", "uniform pages", "one table", "static split"
SYSTEMS = (OURS, REUSE, UNIFORM, ONE_TABLE, SPLIT)
SEEDS = range(5)
"""Heavy tails make streams differ: the claim is checked on several. Comparisons are on the first."""


def system(name: str, plan: CachePlan, cache_bytes: int, max_length: int) -> System | None:
    """One of the systems in so many bytes; None where it doesn't know such models."""
    if name == SPLIT:
        lengths = workloads.MIXED.mean_lengths(max_length)
        tables = cache_baselines.split_tables(plan, cache_bytes, lengths, MAX_NUM_TOKENS)
        return System(name, plan, tables, caches.pool_page_bytes(plan), cache_bytes)
    own = {UNIFORM: cache_baselines.uniform_plan, ONE_TABLE: cache_baselines.one_table_plan}.get(name, lambda p: p)(
        plan
    )
    if own is None:
        return None
    slabs = dict.fromkeys((pool.name for pool in own.pools), own.slab_bytes)
    return System(name, plan, PageTables(own, Arena(cache_bytes // own.slab_bytes)), slabs, cache_bytes)


def measure(shape: str, plan: CachePlan, workload: workloads.Workload) -> dict[str, Any]:
    """All systems under one workload, and how many times as many sequences ours runs at once."""
    serving = cache_geometries.SERVED[shape]
    found: dict[str, Any] = {}
    for name in SYSTEMS:
        tested = system(name, plan, serving.cache_bytes, serving.max_length)
        if tested is not None:
            reuses = name == REUSE
            requests = workload.requests(serving.max_length, shares=reuses)
            found[name] = simulate(tested, requests, reuses=reuses)
    found["precast, useful % of allocated by seed"] = [
        simulate(again, workload.requests(serving.max_length, shares=False, seed=seed))["useful, % of allocated"]
        for seed in SEEDS
        if (again := system(OURS, plan, serving.cache_bytes, serving.max_length)) is not None
    ]
    for name in (UNIFORM, ONE_TABLE, SPLIT):
        if name in found:
            ratio = found[OURS]["sequences at once"] / found[name]["sequences at once"]
            found[f"sequences at once, times {name}"] = round(ratio, 2)
    return found


def described(shape: str, plan: CachePlan) -> dict[str, Any]:
    """The plan in figures."""
    serving = cache_geometries.SERVED[shape]
    return {
        "cache_bytes": serving.cache_bytes,
        "gpus": serving.num_gpus,
        "slab_bytes": plan.slab_bytes,
        "tokens a page": {group.name: group.spec.page_size for group in plan.groups},
        "pages a slab": {pool.name: pool.pages_per_slab for pool in plan.pools},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plans", type=Path, help="where bundles are built, and found again")
    parser.add_argument("--shapes", nargs="*", default=list(cache_geometries.SERVED))
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "caches.json")
    options = parser.parse_args()
    workers = ProcessPoolExecutor(os.cpu_count())
    with tempfile.TemporaryDirectory() as scratch, workers:
        folder = options.plans or Path(scratch)
        shapes = [*options.shapes, cache_geometries.LONG_SEQUENCES]
        plans = dict(zip(shapes, workers.map(cache_geometries.plan_of, shapes, [folder] * len(shapes)), strict=True))
        cases = [(shape, workload) for shape in options.shapes for workload in workloads.WORKLOADS]
        tasks = [workers.submit(measure, shape, plans[shape], workload) for shape, workload in cases]
        long = workers.submit(measure_long_sequences, plans[cache_geometries.LONG_SEQUENCES])
        figures: dict[str, Any] = {shape: described(shape, plans[shape]) for shape in options.shapes}
        for (shape, workload), task in zip(cases, tasks, strict=True):
            figures[shape][workload.name] = task.result()
        figures["gemma-3-12b, sequences of 32,768 tokens in 102.48 GiB"] = long.result()
    harness.write(options.out, "useful bytes among allocated cache bytes, in steady state", figures)


if __name__ == "__main__":
    main()
