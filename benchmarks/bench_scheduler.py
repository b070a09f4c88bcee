"""Host time of a step with 256 running sequences: what is scheduled, and the metadata of it, without tensors.

A step is `schedule`, `BatchInputs.arrays` and `complete`, as the engine runs them around the model. The geometries are
one group with pages (Llama, DeepSeek), a window beside it (Gemma, GPT-OSS), and states beside it (Qwen3-Next), with
pages of 16 and of 64 tokens; contexts are 500 to 3,500 tokens. Beside the median of all steps stands that of the steps
in which a tenth of the sequences has just been replaced by new ones: their prompts are computed in the same step. The
baseline in the same run makes the same arrays by looking at one sequence after the other.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from array import array
from pathlib import Path

import numpy as np
from support import harness

from precast.ir.graph.schema import (
    CachePlan,
    Graph,
    Group,
    PagedInputs,
    PagedSpec,
    Pool,
    Slot,
    StateGroup,
    StateSpec,
    TensorType,
    Value,
)
from precast.ir.memory import caches
from precast.loader.cache.arena import Arena
from precast.loader.cache.prefixes import Prefixes
from precast.loader.cache.tables import PageTables
from precast.loader.run.batch import BatchInputs
from precast.loader.schedule.requests import Chunk, Request
from precast.loader.schedule.scheduler import Scheduler

NUM_SEQS, STEPS = 256, 600
BASELINE = "baseline: arrays, sequence by sequence"
GEOMETRIES: dict[str, tuple[tuple[int | None, ...], int]] = {
    # name: (window of each group with pages, groups of states)
    "full": ((None,), 0),
    "full and window": ((None, 1024), 0),
    "full and states": ((None,), 2),
    "three windows and full": ((None, 128, 512, 1024), 0),
}


def graph_of(windows: tuple[int | None, ...], num_states: int, page_size: int) -> Graph:
    """No nodes: inputs and caches only, of two layers a group."""
    groups: list[Group] = []
    states: list[StateGroup] = []
    inputs: list[Value] = []
    for name in ("input_ids", "positions", "logit_rows"):
        inputs.append(Value(name, TensorType("int64", ("R",) if name == "logit_rows" else (1, "T"))))
    inputs += [Value(name, TensorType("int32", ("B",))) for name in ("cu_seqlens", "kv_lens")]
    for i, window in enumerate(windows):
        spec = PagedSpec(2, 64, 64, "bfloat16", page_size, window)
        roles = {role: f"{role}_{i}" for role in ("page_indices", "page_indptr", "page_start", "slot_mapping")}
        inputs += [Value(name, TensorType("int64" if role == "slot_mapping" else "int32", ("N",)))
                   for role, name in roles.items()]  # fmt: skip
        groups.append(Group(f"g{i}", f"g{i}", spec, PagedInputs(**roles), _slots(f"g{i}", spec)))
    for i in range(num_states):
        state = StateSpec("state", (16, 64), "float32")
        inputs.append(Value(f"slot_ids_{i}", TensorType("int32", ("B",))))
        states.append(StateGroup(f"s{i}", f"s{i}", state, f"slot_ids_{i}", _slots(f"s{i}", state)))
    pools = tuple(Pool(name, f"P_{name}") for name in [group.name for group in groups] + [s.name for s in states])
    return Graph(
        (), tuple(inputs), (), (), (), (), {"logits": "logits"}, CachePlan(pools, tuple(groups), tuple(states))
    )


def _slots(group: str, spec: PagedSpec | StateSpec) -> tuple[Slot, ...]:
    types = caches.slot_types(spec, f"P_{group}")
    return tuple(
        Slot(f"{group}.{layer}", tuple(Value(f"{group}.{layer}.{i}", kind) for i, kind in enumerate(types)))
        for layer in range(2)
    )


def measure(graph: Graph, *, reuses: bool = True) -> dict[str, float]:
    """Median microseconds of decode steps, of their parts, and of steps with new prompts."""
    draw = random.Random(0)
    plan = caches.with_slabs(graph.caches)
    tables = PageTables(plan, Arena(caches.slabs_for(plan, NUM_SEQS, 5000, 8192)))
    prefixes = Prefixes(tables) if reuses else None
    scheduler = Scheduler(tables, max_num_seqs=NUM_SEQS, max_num_tokens=8192, prefixes=prefixes)
    inputs = BatchInputs(graph)
    numbers = iter(range(1, 10**6))

    def submit() -> None:
        prompt = array("q", [draw.randrange(10**5) for _ in range(draw.randint(500, 3500))])
        scheduler.submit(Request(next(numbers), prompt, len(prompt) + 1400))

    for _ in range(NUM_SEQS):
        submit()
    times: dict[str, list[float]] = {name: [] for name in ("schedule", "arrays", "complete", "step", "with prompts")}
    step = 0
    while step < STEPS:
        if len(scheduler.decoding) == NUM_SEQS and step % 100 == 99:
            for request in draw.sample(scheduler.decoding.requests, NUM_SEQS // 10):
                scheduler.remove(request)
                submit()
        started = time.thread_time()
        planned = scheduler.schedule()
        scheduled = time.thread_time()
        inputs.arrays(planned.chunks, scheduler.decoding)
        made = time.thread_time()
        scheduler.complete(planned, [7] * len(planned.sampled))
        ended = time.thread_time()
        if planned.chunks:
            times["with prompts"].append(ended - started)
            step += len(scheduler.decoding) == NUM_SEQS
        else:
            step += 1
            for name, seconds in zip(
                ("schedule", "arrays", "complete", "step"),
                (scheduled - started, made - scheduled, ended - made, ended - started),
                strict=True,
            ):
                times[name].append(seconds)
    found = {name: round(statistics.median(values) * 1e6, 1) for name, values in times.items()}
    found[BASELINE] = round(one_by_one(inputs, scheduler) * 1e6, 1)
    found["step, 99th percentile"] = round(sorted(times["step"])[int(len(times["step"]) * 0.99)] * 1e6, 1)
    return found


def one_by_one(inputs: BatchInputs, scheduler: Scheduler) -> float:
    """Median seconds of a decode step's arrays, each sequence's made by itself, as those of prompts are."""
    decodes = scheduler.schedule().decodes

    times = []
    for _ in range(21):
        started = time.thread_time()
        made = inputs.arrays([Chunk(request, 1) for request in decodes])
        times.append(time.thread_time() - started)
    ours = inputs.arrays([], scheduler.decoding)
    assert all(np.array_equal(values, made[name]) for name, values in ours.items())
    return statistics.median(times)


def main() -> None:
    figures = {
        f"{name}, pages of {size}": measure(graph_of(windows, states, size))
        for name, (windows, states) in GEOMETRIES.items()
        for size in (16, 64)
    }
    claim = f"scheduler and metadata, microseconds a step with {NUM_SEQS} running sequences"
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else harness.RESULTS / "scheduler.json"
    harness.write(out, claim, {"goal": 300, **figures})


if __name__ == "__main__":
    main()
