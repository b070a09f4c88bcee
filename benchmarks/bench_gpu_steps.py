"""On a GPU: steps replayed as graphs, one launched ahead, against the same engine op by op.

Claims: a decode step as served takes hardly longer than its graph alone; all sizes are captured in seconds; greedy
tokens are those of the eager engine. Shapes are published ones with random weights.

    python benchmarks/bench_gpu_steps.py --build DIR [SHAPE ...]
    python benchmarks/bench_gpu_steps.py --bundles DIR [SHAPE ...]
"""

from __future__ import annotations

import argparse
import statistics
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from support import harness, shapes
from support.random_model import RandomModel, collect
from support.served_steps import decoding, end, prefill, prompts

import precast
from precast.ir.artifact import Bundle
from precast.loader.sizing import EngineLimits

SHAPES = ("llama-3.1-8b", "gemma-3-12b", "qwen3-30b-a3b-half")
BATCHES = (1, 8, 64, 256)
STEPS = 48
LIMITS = EngineLimits(256, 8192, 8192, 24 << 30)


def build(folder: Path, names: list[str]) -> None:
    """The bundles in bfloat16, on any machine."""
    for name in names:
        source = shapes.write_config(name, folder / f"{name}.config")
        precast.build(source, folder / f"{name}.bundle", dtype="bfloat16", max_seq_len=8192)


def measure(bundle: Bundle) -> dict[str, Any]:
    """Both engines, one after the other."""
    model = RandomModel(bundle, LIMITS)
    found: dict[str, Any] = {}
    tokens = []
    for name, sizes in (("eager", ()), ("captured", model.default_sizes)):
        runner = model.runner(sizes)
        engine = model.engine(runner)
        engine.wait_until_captured()
        tokens.append(greedy_tokens(engine))
        found[name] = {str(count): decode(engine, count) for count in BATCHES}
        found[name]["prefill_tokens_per_s"] = {f"{n} x {length}": prefill(engine, n, length)
                                               for n, length in ((1, 512), (1, 4096), (4, 8000))}  # fmt: skip
        if sizes:
            stats = engine.stats
            found["capture"] = {
                "sizes": stats.graphs, "seconds": round(stats.capture_seconds, 2),
                "eager_steps": stats.eager_reasons, "pieces": runner.captures.num_pieces,
            }  # fmt: skip
        engine.close()
        del runner, engine
        collect()
    found["greedy_tokens_equal"] = [a == b for a, b in zip(*tokens, strict=True)]
    return found


def greedy_tokens(engine: Any) -> list[list[int]]:
    """Answers to prompts of unequal length that run together."""
    asked = [prompt[: 5 + 31 * i] for i, prompt in enumerate(prompts(8, 300))]
    params = precast.SamplingParams(max_tokens=24, ignore_eos=True)
    return [output.token_ids for output in engine.generate(asked, params)]


def decode(engine: Any, count: int) -> dict[str, float]:
    """Milliseconds a step of `count` sequences that decode: as served, and of these the host's own."""
    numbers = decoding(engine, count)
    waited = 0.0
    collect = engine._runner.collect

    def timed(ticket: Any) -> list[int]:
        nonlocal waited
        started = time.perf_counter()
        ticket.arrived.synchronize()
        waited += time.perf_counter() - started
        return collect(ticket)

    engine._runner.collect = timed
    torch.cuda.synchronize()
    times = []
    for _ in range(STEPS // 12):
        started = time.perf_counter()
        for _ in range(8):
            engine.step()
        times.append((time.perf_counter() - started) / 8)
    del engine._runner.collect
    spent = waited / (8 * len(times))
    alone = replay_ms(engine, count)  # over the inputs of the last step: it writes again what that wrote
    end(engine, numbers)
    served = statistics.median(times)
    found = {"ms": round(1000 * served, 3), "host_ms": round(1000 * (statistics.mean(times) - spent), 3)}
    return found if alone is None else found | {"graph_alone_ms": alone, "ratio": round(1000 * served / alone, 3)}


def replay_ms(engine: Any, count: int) -> float | None:
    """Milliseconds of the graph alone, with its last inputs; None if none is captured.

    The last step must have had so many tokens: each size has a layout of its inputs, in the same memory.
    """
    size = engine._runner.captures.size_for(count)
    if size is None:
        return None
    step = engine._runner.captures._steps[size]
    step.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(5):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(8):
            step.replay()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 8)
    return round(statistics.median(times), 3)


def main() -> None:
    """Build, or measure and write `results/gpu_steps.json`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=Path)
    parser.add_argument("--bundles", type=Path)
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "gpu_steps.json")
    parser.add_argument("shapes", nargs="*", default=SHAPES)
    arguments = parser.parse_args()
    if arguments.build:
        build(arguments.build, list(arguments.shapes))
        return
    if not torch.cuda.is_available() or arguments.bundles is None:
        print("needs a CUDA GPU, --bundles: nothing measured")
        return
    found = {}
    for name in arguments.shapes:
        try:
            found[name] = measure(Bundle.open(arguments.bundles / f"{name}.bundle"))
        except Exception as error:  # noqa: BLE001 - one model must not stop the others
            traceback.print_exc()
            found[name] = {"error": repr(error)}
        collect()
        harness.write(arguments.out, "gpu_steps", found)


if __name__ == "__main__":
    main()
