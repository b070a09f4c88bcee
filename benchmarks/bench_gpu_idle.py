"""On a GPU: the share of steady decode steps in which no kernel runs, and what the host spends on a step, by part.

Claims: the host's time of a captured step is at most 60, 150 and 300 microseconds at 1, 64 and 256 sequences, what the
driver takes to launch its graph left out and given beside it; and it is hidden, so that no kernel runs in less than 3 %
of the time. The baseline is the same engine op by op. The shape is that of Llama 3.1 8B with random weights.

    python benchmarks/bench_gpu_idle.py --build DIR
    python benchmarks/bench_gpu_idle.py --bundles DIR

Kernels are traced one by one, which slows graphs of many kernels: `idle` says how long the traced steps took, and how
much of the time without a kernel lay between steps, where the host would have to be waited for, and how much between
kernels of one step.
"""

from __future__ import annotations

import argparse
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import bench_gpu_steps
import torch
from support import harness
from support.random_model import RandomModel, collect
from support.step_parts import StepParts

import precast
from precast.ir.artifact import Bundle

SHAPE = "llama-3.1-8b"
GOALS = {1: 60.0, 64: 150.0, 256: 300.0}
"""Microseconds of the host a captured step, by sequences, without the launch of its graph."""
IDLE_GOAL = 0.03
TRACED_SEQUENCES, STEPS = 64, 50


class Activity(NamedTuple):
    """What the GPU did, in nanoseconds. A `transfer` copies between host and device."""

    start: int
    end: int
    is_transfer: bool


class Idle(NamedTuple):
    """Shares of the time from the first kernel to the end of the last: in which none ran, and where that was."""

    share: float
    between_steps: float
    within_steps: float


def idle(activities: Iterable[Activity]) -> Idle:
    """Steps are told apart by their transfers: no other work lies between those of the one and of the next."""
    busy_until = None
    began = between = within = 0
    crossed = False  # whether there was a transfer since the last kernel
    for start, end, is_transfer in sorted(activities):
        if is_transfer:
            crossed = True
            continue
        if busy_until is None:
            began = busy_until = start
        gap = max(0, start - busy_until)
        between, within = between + gap * crossed, within + gap * (not crossed)
        busy_until, crossed = max(busy_until, end), False
    whole = (busy_until or 0) - began
    return Idle((between + within) / whole, between / whole, within / whole) if whole else Idle(0.0, 0.0, 0.0)


def traced(run: Callable[[], object]) -> list[Activity]:
    """The kernels and transfers of what runs; other copies and fills of memory count as kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    results: Any = profile.profiler
    found = []
    for event in results.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            is_transfer = event.name().startswith(("Memcpy HtoD", "Memcpy DtoH"))
            found.append(Activity(event.start_ns(), event.start_ns() + event.duration_ns(), is_transfer))
    return found


def decoding(engine: Any, count: int) -> list[int]:
    """Let so many sequences decode, and nothing else; their ids."""
    params = precast.SamplingParams(max_tokens=1000, ignore_eos=True)
    # Of unequal lengths, so that they don't all need a page in the same step.
    numbers = [engine.submit(prompt[i % 64 :], params) for i, prompt in enumerate(bench_gpu_steps.prompts(count, 160))]
    while engine.stats.requests_waiting or engine._scheduler._chunked:
        engine.step()
    for _ in range(8):
        engine.step()
    return numbers


def stopped(engine: Any, numbers: Sequence[int]) -> None:
    for number in numbers:
        engine.cancel(number)
    while engine.has_work:
        engine.step()
    torch.cuda.synchronize()


def steps(engine: Any) -> dict[str, Any]:
    """Medians of a step: milliseconds as served, and microseconds of the host, all and by part.

    The host's are without the time that it waits for the GPU.
    """
    served, spent = [], []
    with StepParts(engine, parts=("wait",)) as waits:
        for _ in range(STEPS):
            started = time.perf_counter()
            waits.step()
            served.append(time.perf_counter() - started)
            spent.append(1e6 * served[-1] - waits.microseconds["wait"][-1])
    with StepParts(engine) as parts:
        for _ in range(STEPS):
            parts.step()
    found = parts.medians()
    found.pop("wait", None)
    return {
        "ms": round(1000 * statistics.median(served), 3),
        "host_us": round(statistics.median(spent), 1),
        "parts": found,
    }


def measure_captured(engine: Any) -> dict[str, Any]:
    """Steps at each number of sequences, and the idle share at one of them."""
    found: dict[str, Any] = {}
    for count, goal in GOALS.items():
        numbers = decoding(engine, count)
        one = found[str(count)] = steps(engine)
        one["graph_alone_ms"] = bench_gpu_steps.replay_ms(engine, count)
        without = one["host_us_without_graph_launch"] = round(one["host_us"] - one["parts"]["replay"], 1)
        one |= {"goal_us": goal, "met": without <= goal, "met with the graph's launch": one["host_us"] <= goal}
        stopped(engine, numbers)
    return found | {"idle": attempt(lambda: measure_idle(engine))}


def measure_eager(engine: Any) -> dict[str, Any]:
    """The same op by op, without goals."""
    found: dict[str, Any] = {}
    for count in GOALS:
        numbers = decoding(engine, count)
        found[str(count)] = steps(engine)
        stopped(engine, numbers)
    return found | {"idle": attempt(lambda: measure_idle(engine))}


def attempt(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the call measures, or the error with which it fails: other figures are wanted all the same."""
    try:
        return call()
    except Exception:  # noqa: BLE001
        return {"error": traceback.format_exc()}


def measure_idle(engine: Any) -> dict[str, Any]:
    """Time without a kernel at `TRACED_SEQUENCES`, traced."""
    numbers = decoding(engine, TRACED_SEQUENCES)

    def run() -> None:
        for _ in range(STEPS):
            engine.step()

    activities = traced(run)
    stopped(engine, numbers)
    kernels = [each for each in activities if not each.is_transfer]
    if not kernels:
        return {"error": "the profiler gave no kernel"}
    whole = max(each.end for each in kernels) - min(each.start for each in kernels)
    found = idle(activities)
    return {
        "sequences": TRACED_SEQUENCES, "steps": STEPS, "kernels a step": round(len(kernels) / STEPS, 1),
        "traced_ms": round(whole / STEPS / 1e6, 3), "share": round(found.share, 4), "goal": IDLE_GOAL,
        "met": found.share < IDLE_GOAL, "between steps": round(found.between_steps, 5),
        "within steps": round(found.within_steps, 4),
    }  # fmt: skip


def measure(bundle: Bundle, out: Path) -> None:
    """Both engines, one after the other; what one of them fails at is in the results."""
    attempt(lambda: {"warm-up": traced(partial(torch.zeros, 1, device="cuda"))})  # the first trace sets up the tracing
    model = RandomModel(bundle, bench_gpu_steps.LIMITS)
    found: dict[str, Any] = {}
    for name, sizes, run in (("captured", model.default_sizes, measure_captured), ("eager", (), measure_eager)):
        engine = model.engine(model.runner(sizes))
        engine.wait_until_captured()
        found[name] = attempt(partial(run, engine))
        engine.close()
        del engine
        collect()
        harness.write(out, "gpu_idle", {SHAPE: found})


def main() -> None:
    """Build, or measure and write `results/gpu_idle.json`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=Path)
    parser.add_argument("--bundles", type=Path)
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "gpu_idle.json")
    arguments = parser.parse_args()
    if arguments.build:
        bench_gpu_steps.build(arguments.build, [SHAPE])
        return
    if not torch.cuda.is_available() or arguments.bundles is None:
        print("needs a CUDA GPU and --bundles: nothing measured")
        return
    measure(Bundle.open(arguments.bundles / f"{SHAPE}.bundle"), arguments.out)


if __name__ == "__main__":
    main()
