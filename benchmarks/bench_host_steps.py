"""The host's time of a captured decode step, without the program: a real engine whose graphs do nothing.

The device is a CPU that says it has memory of its own, as a GPU has: what is copied to it goes nowhere, since a GPU
copies by itself, and what is captured on it is an empty graph. So a step costs what the engine does around the program:
schedule, make the inputs, replay, collect, hand out. What the driver needs besides to copy and to launch is measured on
a GPU (`bench_gpu_idle.py`). The baseline in the same run is the same engine op by op, on a program that does nothing
but give logits. Times are of this thread: others on the machine take none of it.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bench_scheduler
import msgspec
import torch
from support import harness
from support.step_parts import StepParts

from precast.ir.graph.schema import TensorType, Value
from precast.ir.manifest import ModelInfo
from precast.ir.memory import caches
from precast.loader.cache.memory import CacheMemory
from precast.loader.device import Buffer
from precast.loader.engine.engine import Engine
from precast.loader.engine.params import SamplingParams
from precast.loader.run.runner import Runner
from precast.loader.sizing import EngineLimits
from precast.loader.timeline import Timeline
from precast.loader.torch_device import CpuDevice, tensor_of

GOALS = {1: 60.0, 64: 150.0, 256: 300.0}
"""Microseconds a step, by sequences."""
STEPS, PAGE_SIZE, VOCAB = 300, 16, 8
PARAMS = {
    "greedy": SamplingParams(max_tokens=None, ignore_eos=True),
    "drawn": SamplingParams(max_tokens=None, temperature=0.8, top_p=0.95, top_k=40, ignore_eos=True),
}


class EmptyGraphs(CpuDevice):
    """A CPU whose captured graphs are empty, and which leaves copies to nobody."""

    kind = "cuda"

    def copy(self, target: Buffer, source: Buffer, stream: object = None) -> None:
        """What a GPU gets is made, and not copied."""
        tensor_of(target), tensor_of(source)

    @contextmanager
    def capture(self, stream: object = None, pool: object = None) -> Iterator[Any]:
        """What the body does is done, and nothing is recorded."""
        yield EmptyGraph()


class EmptyGraph:
    """A graph without nodes."""

    def replay(self) -> None:
        """Nothing to run."""


class NoProgram:
    """Logits for the rows that want them, whatever the inputs are."""

    num_binds = 1

    def __call__(self, *, logit_rows: torch.Tensor, **_: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": torch.zeros(1, len(logit_rows), VOCAB)}

    def cut(self, outputs: dict[str, torch.Tensor], **inputs: torch.Tensor) -> Iterator[Any]:
        """The same, in one piece."""
        outputs |= self(**inputs)
        return iter(())

    warm_up = cut


def engine_of(windows: tuple[int | None, ...], num_states: int, sizes: tuple[int, ...]) -> Engine:
    """An engine for up to 256 sequences on empty graphs of these sizes."""
    graph = bench_scheduler.graph_of(windows, num_states, PAGE_SIZE)
    # Nothing makes the logits here: as a constant they have a type.
    logits = Value("logits", TensorType("float32", (1, "R", VOCAB)))
    graph = msgspec.structs.replace(graph, constants=(logits,))
    device, limits = EmptyGraphs(), EngineLimits(max(GOALS), 8192, 8192)
    slabs = caches.slabs_for(caches.with_slabs(graph.caches), max(GOALS), 2048, 8192)
    memory = CacheMemory(graph.caches, slabs, device)
    program: Any = NoProgram()
    runner = Runner(program, graph, memory, device, limits, captured_sizes=sizes)
    runner.capture_all()
    model = ModelInfo("", "", "float32", VOCAB, 8192, 2, 1, eos_token_ids=(2,))
    return Engine(runner, model, tokenizer_files={}, timeline=Timeline())


def measure(engine: Engine, count: int, params: SamplingParams) -> tuple[float, dict[str, float]]:
    """Median microseconds of a decode step of `count` sequences, and those of its parts, timed in other steps."""
    draw = random.Random(0)
    numbers = [
        engine.submit([draw.randrange(VOCAB) for _ in range(draw.randint(100, 1000))], params) for _ in range(count)
    ]
    while engine.stats.requests_waiting or engine._scheduler._chunked:
        engine.step()
    times = []
    for _ in range(STEPS):
        started = time.thread_time()
        engine.step()
        times.append(1e6 * (time.thread_time() - started))
    with StepParts(engine, clock=time.thread_time) as parts:
        for _ in range(STEPS):
            parts.step()
    for number in numbers:
        engine.cancel(number)
    while engine.has_work:
        engine.step()
    return round(statistics.median(times), 1), parts.medians()


def main() -> None:
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"goals": {str(count): goal for count, goal in GOALS.items()}}
    for name, (windows, num_states) in bench_scheduler.GEOMETRIES.items():
        found = figures[name] = {}
        captured, eager = (engine_of(windows, num_states, sizes) for sizes in (tuple(GOALS), ()))
        for sampling, params in PARAMS.items():
            for count, goal in GOALS.items():
                spent, parts = measure(captured, count, params)
                baseline, _ = measure(eager, count, params)
                found[f"{sampling}, {count}"] = {
                    "microseconds": spent, "met": spent <= goal, "parts": parts,
                    "baseline: op by op": baseline, "ratio": round(spent / baseline, 3),
                }  # fmt: skip
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else harness.RESULTS / "host_steps.json"
    harness.write(out, "microseconds of the host a captured decode step, without the program", figures)


if __name__ == "__main__":
    main()
