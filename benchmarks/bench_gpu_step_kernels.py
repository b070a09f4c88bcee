"""On a GPU: which kernels a captured decode step waits for.

Claim: what a step of one sequence takes beyond the time of its bytes lies between its products: norms, rotation,
attention of short contexts, gates. Kernels overlap, so their durations add up to more than a step; what is reported of
each is by how much its end comes after the ends of all kernels in front of it. These times add up to the step. Layers
are alike: the median of all of them is given, of steps in a row, by the profiler.

    python benchmarks/bench_gpu_step_kernels.py --bundles DIR [--out FILE] [SHAPE:COUNT,COUNT ...]

The bundles are those that `bench_gpu_served.py --build` makes; weights are random ones.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import bench_gpu_idle
import bench_gpu_steps
import torch
from support import harness
from support.random_model import RandomModel, collect

from precast.ir.artifact import Bundle

SHAPES = ("llama-3.1-8b-fp8:1,8,64,256", "llama-3.1-8b-int4:1,64,256", "gpt-oss-20b-mxfp4:1,64,256")
STEPS = 12
LONGEST_LAYER = 24
"""Launches of a layer, at most."""
LEAST_LAYERS = 15
"""Layers in a row with the same kernels."""


class Ran(NamedTuple):
    """A kernel as the profiler saw it, in nanoseconds."""

    name: str
    start: int
    end: int


def traced(engine: Any) -> list[list[Ran]]:
    """The kernels of some steps in a row, step by step, those with the same kernels as most."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(STEPS):
            engine.step()
        torch.cuda.synchronize()
    results: Any = profile.profiler
    events = [
        Ran(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in results.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA
    ]
    steps: list[list[Ran]] = [[]]
    for event in sorted(events, key=lambda each: each.start):
        if event.name.startswith(("Memcpy HtoD", "Memcpy DtoH")):  # between steps alone
            steps.append([])
        else:
            steps[-1].append(event)
    named = [tuple(event.name for event in step) for step in steps]
    most = statistics.mode(names for names in named if len(names) > LEAST_LAYERS)
    return [step for step, names in zip(steps, named, strict=True) if names == most]


def waited_us(steps: Sequence[Sequence[Ran]]) -> list[tuple[str, float]]:
    """Each kernel of a step, and by how many microseconds its end comes after those of all in front: medians."""
    found = []
    for place in range(len(steps[0])):
        later = []
        for step in steps:
            before = max((each.end for each in step[:place]), default=step[0].start)
            later.append(max(step[place].end - before, 0))
        found.append((steps[0][place].name, statistics.median(later) / 1000))
    return found


def layer_of(kernels: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """The kernels of one layer, of a step's: medians of all layers but the first two and the last."""
    names = [name for name, _ in kernels]
    for length in range(4, LONGEST_LAYER + 1):
        run = longest = last = 0
        for i in range(length, len(names)):
            run = run + 1 if names[i] == names[i - length] else 0
            longest, last = max((longest, last), (run, i))
        if longest >= LEAST_LAYERS * length:
            first, layers = last - longest - length + 1, (longest + length) // length
            return [
                (names[first + i], statistics.median(kernels[first + i + length * n][1] for n in range(2, layers - 1)))
                for i in range(length)
            ]
    raise ValueError(f"{len(names)} kernels, and no {LEAST_LAYERS} layers with the same ones")


def measured(engine: Any, count: int) -> dict[str, Any]:
    """A row of the table."""
    numbers = bench_gpu_steps.decoding(engine, count)
    steps = traced(engine)
    bench_gpu_idle.stopped(engine, numbers)
    layer = layer_of(waited_us(steps))
    return {
        "step_ms": round(statistics.median(max(each.end for each in step) - step[0].start for step in steps) / 1e6, 3),
        "layer_us": round(sum(us for _, us in layer), 1),
        "kernels": [[name[:60], round(us, 2)] for name, us in layer],
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundles", type=Path, default=Path("build/driver"))
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "gpu_step_kernels.json")
    parser.add_argument("shapes", nargs="*", default=list(SHAPES), metavar="SHAPE:COUNTS")
    arguments = parser.parse_args()
    bench_gpu_idle.traced(lambda: torch.zeros(1, device="cuda"))  # the first trace sets up the tracing
    figures: dict[str, Any] = {}
    for wanted in arguments.shapes:
        shape, _, given = wanted.partition(":")
        counts = [int(count) for count in given.split(",")]
        model = RandomModel(Bundle.open(arguments.bundles / f"{shape}.bundle"), bench_gpu_steps.LIMITS)
        engine = model.engine(model.runner(counts))
        engine.wait_until_captured()
        figures[shape] = {str(count): measured(engine, count) for count in counts}
        engine.close()
        del engine, model
        collect()
        harness.write(arguments.out, "gpu_step_kernels", figures)


if __name__ == "__main__":
    main()
