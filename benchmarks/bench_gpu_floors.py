"""On a GPU: how long steps of several kinds of models take as served, beside the least that the machine allows.

Claims: a decode step of 1 and of 64 sequences, captured, and a prompt of 4096 tokens are near their floor, the larger
of two times: that of the bytes that the step must move (`step_floors`), at the rate of a sum over 8 GB, and that of its
products, at the rate of 8192 x 8192 x 8192 in bfloat16; both rates are measured in the same run. Shapes are published
ones with random weights, of larger models some layers; how many experts a step uses is counted while it runs op by op.
The prompt is computed by an engine that keeps nothing for reuse: another one computes a prompt of a model with states
in two steps, to keep them as they are at the end of its last whole span, and the floor is that of one.

    python benchmarks/bench_gpu_floors.py --build DIR [SHAPE ...]
    python benchmarks/bench_gpu_floors.py --bundles DIR [--out FILE] [SHAPE ...]
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import bench_gpu_steps
import torch
from support import harness, step_floors
from support.gpu_times import product_flops_per_second, read_bytes_per_second
from support.random_model import RandomModel, collect

from precast import SamplingParams
from precast.ir.artifact import Bundle
from precast.kernels.registry import Implementation, implementations
from precast.kernels.use import Use
from precast.loader.engine.engine import Engine
from precast.loader.sizing import EngineLimits

SHAPES = ("nemotron-h-8b", "qwen3-next-80b-6-layers", "deepseek-v3-4-layers", "gpt-oss-20b")
BATCHES = (1, 64)
PREFILL = 4096
LIMITS = EngineLimits(max(BATCHES), 8192, 8192, 16 << 30)


class CountedExperts:
    """For `choose`: counts the experts that each layer uses, as it runs op by op."""

    def __init__(self) -> None:
        self.used: list[int] = []

    def __call__(self, use: Use) -> Sequence[Implementation]:
        found = implementations(use)
        if use.node.op not in step_floors.EXPERTS:
            return found
        return [each._replace(function=self._counting(each.function)) for each in found]

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **arguments: Any) -> Any:
            self.used.append(arguments["expert_ids"].unique().numel())
            return function(*args, **arguments)

        return run


def experts_used(model: RandomModel) -> dict[str, list[int]]:
    """How many experts each layer uses, in a step of each kind, op by op."""
    experts = CountedExperts()
    engine = model.engine(model.runner((), choose=experts), reuses_prefixes=False)
    found = {"prefill": _used_by(experts, engine, 1, PREFILL, max_tokens=1)}
    for count in BATCHES:
        found[str(count)] = _used_by(experts, engine, count, bench_gpu_steps.PROMPT_TOKENS, max_tokens=12)
    engine.close()
    return found


def _used_by(experts: CountedExperts, engine: Engine, count: int, length: int, *, max_tokens: int) -> list[int]:
    """In the last step of requests that are as long as one another."""
    for prompt in bench_gpu_steps.prompts(count, length):
        engine.submit(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    used: list[int] = []
    while engine.has_work:
        experts.used = []
        engine.step()
        used = experts.used or used
    return used


def measure(bundle: Bundle, rates: dict[str, float]) -> dict[str, Any]:
    """One model's steps: milliseconds, floors, and how often the floor each takes."""
    started = time.perf_counter()
    model = RandomModel(bundle, LIMITS)
    used = experts_used(model)
    collect()
    runner = model.runner(BATCHES)
    runner.capture_all()
    engine = model.engine(runner)
    found: dict[str, Any] = {"pieces": engine._runner.captures.num_pieces}
    ready = time.perf_counter() - started
    for count in BATCHES:
        one = bench_gpu_steps.decode(engine, count)
        length = bench_gpu_steps.PROMPT_TOKENS + bench_gpu_steps.STEPS // 2
        floor = step_floors.floor(model.graph, tokens=count, sequences=count, length=length, experts=used[str(count)])
        found[f"decode {count}"] = row(one["ms"], floor, rates) | one
    engine.close()
    del engine, runner
    collect()
    engine = model.engine(model.runner(()), reuses_prefixes=False)
    rate = bench_gpu_steps.prefill(engine, 1, PREFILL)
    floor = step_floors.floor(model.graph, tokens=PREFILL, sequences=1, length=PREFILL, experts=used["prefill"])
    found[f"prefill 1 x {PREFILL}"] = row(1000 * PREFILL / rate, floor, rates) | {"tokens_per_s": rate}
    engine.close()
    seconds = {"ready_seconds": round(ready, 1), "seconds": round(time.perf_counter() - started, 1)}
    return found | {"experts_used": used, **seconds}


def row(ms: float, floor: step_floors.Floor, rates: dict[str, float]) -> dict[str, Any]:
    """A step beside its floor."""
    least = floor.milliseconds(rates["read_bytes_per_s"], rates["product_flops_per_s"])
    is_read = floor.milliseconds(rates["read_bytes_per_s"], float("inf")) == least
    return {
        "ms": round(ms, 3), "floor_ms": round(least, 3), "of_floor": round(ms / least, 3),
        "floor": "bytes" if is_read else "products", "gb": round(sum(floor[:2]) / 1e9, 3),
        "tflop": round(floor.flops / 1e12, 3),
    }  # fmt: skip


def printed(name: str, found: dict[str, Any]) -> None:
    """A small table."""
    if "error" in found:
        print(f"{name}: {found['error']}", flush=True)
        return
    print(f"{name}: {found['seconds']} s, {found['pieces']} piece(s)", flush=True)
    for step, one in found.items():
        if isinstance(one, dict) and "ms" in one:
            alone = one.get("graph_alone_ms", "")
            print(f"  {step:16} {one['ms']:9} ms  graph {alone!s:>8}  floor {one['floor_ms']:8} ({one['floor']})"
                  f"  x {one['of_floor']}", flush=True)  # fmt: skip


def main() -> None:
    """Build, or measure and write `results/gpu_floors.json`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=Path)
    parser.add_argument("--bundles", type=Path)
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "gpu_floors.json")
    parser.add_argument("shapes", nargs="*", default=SHAPES)
    arguments = parser.parse_args()
    if arguments.build:
        bench_gpu_steps.build(arguments.build, list(arguments.shapes))
        return
    if not torch.cuda.is_available() or arguments.bundles is None:
        print("needs a CUDA GPU and --bundles: nothing measured")
        return
    rates = {"read_bytes_per_s": read_bytes_per_second(), "product_flops_per_s": product_flops_per_second()}
    collect()
    figures: dict[str, Any] = json.loads(arguments.out.read_text())["figures"] if arguments.out.exists() else {}
    figures["rates"] = rates
    print(f"{rates['read_bytes_per_s'] / 1e12:.2f} TB/s, {rates['product_flops_per_s'] / 1e12:.0f} TFLOP/s", flush=True)
    for name in arguments.shapes:
        try:
            figures[name] = measure(Bundle.open(arguments.bundles / f"{name}.bundle"), rates)
        except Exception as error:  # noqa: BLE001 - one model must not stop the others
            figures[name] = {"error": f"{type(error).__name__}: {error}"[:600]}
        collect()
        printed(name, figures[name])
        with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
            harness.write(arguments.out, "gpu_floors", figures)


if __name__ == "__main__":
    main()
