"""On a GPU: requests arrive while others decode, on captured steps and, beside them, op by op.

Claims: while 32 sequences decode and prompts of 8,000 tokens arrive, the 99th percentile of the time between tokens is
below three times its median; of all tokens computed at most 15 % are padding. Requests of 1,000 tokens in and 256 out
come by a Poisson process at half and at four fifths of the rate that the captured engine reaches when all are there at
once; the engine that runs op by op gets the same ones. The shape is the published one with random weights.

    python benchmarks/bench_gpu_mixed_load.py --build DIR
    python benchmarks/bench_gpu_mixed_load.py --bundles DIR --checkpoints DIR
    python benchmarks/bench_gpu_mixed_load.py --bundles DIR --simulate

`--build` and `--simulate` need no GPU: the latter runs the same loads through the scheduler alone, by a formula for the
seconds of a step (`simulated_engine.StepTime`), and writes nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support import harness, random_checkpoints, shapes
from support.mixed_load import (
    GOAL_PADDING,
    GOAL_RATIO,
    Clock,
    Load,
    Serves,
    WallClock,
    at_once,
    long_prompts,
    over_time,
    prompts,
)
from support.simulated_engine import SimulatedEngine

import precast
from precast.ir.artifact import Bundle

SHAPE = "llama-3.1-8b"
SATURATED, LONG, UNLIMITED = "all at once", "long prompts arrive", "long prompts arrive, max_prefill_tokens unlimited"


def build(folder: Path) -> None:
    """The bundle in bfloat16, on any machine."""
    precast.build(shapes.write_config(SHAPE, folder / f"{SHAPE}.config"), folder / f"{SHAPE}.bundle",
                  dtype="bfloat16", max_seq_len=8192)  # fmt: skip


def measure(bundle: Path, checkpoint: Path, load: Load, device: str = "cuda") -> dict[str, Any]:
    """Both engines, one after the other, on the same loads."""
    found: dict[str, Any] = {}
    rate = None
    for name, capture in (("captured", "before"), ("eager", "off")):
        engine = precast.load(bundle, weights=checkpoint, device=device, capture=capture,
                              max_num_seqs=load.max_num_seqs, max_num_tokens=load.max_num_tokens)  # fmt: skip
        warm_up(engine, load)
        found[name] = loads(engine, WallClock(), load, rate)
        rate = found[name][SATURATED].get("requests_per_s", rate) if rate is None else rate
        if name == "captured":
            engine.forget_prefixes()  # the same prompts come again
            engine._max_prefill_tokens = load.max_num_tokens
            found[name][UNLIMITED] = tried(lambda engine=engine: long_prompts(engine, WallClock(), load))
        engine.close()
        del engine
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return found | {"goals": goals(found["captured"])}


def simulate(bundle: Path, load: Load) -> dict[str, Any]:
    """The same by a formula: what a schedule can be expected to reach before any GPU is asked."""
    graph = Bundle.open(bundle).graph
    found: dict[str, Any] = {}
    rate = None
    for name, sizes in (("captured", graph.capture.sizes), ("eager", ())):
        engine = SimulatedEngine(graph.caches, sizes, load)
        found[name] = loads(engine, engine, load, rate)
        rate = rate or found[name][SATURATED]["requests_per_s"]
    engine = SimulatedEngine(graph.caches, graph.capture.sizes, load, max_prefill_tokens=load.max_num_tokens)
    found["captured"][UNLIMITED] = long_prompts(engine, engine, load)
    return found | {"goals": goals(found["captured"])}


def loads(engine: Serves, clock: Clock, load: Load, rate: float | None) -> dict[str, Any]:
    """Every load on one engine. `rate` of requests, a second, is what shares are of; None: what this engine reaches."""
    found = {SATURATED: tried(lambda: at_once(engine, clock, load))}
    rate = rate or found[SATURATED].get("requests_per_s", 1.0)
    for share in load.shares:
        name = f"{100 * share:.0f} % of saturation"
        found[name] = tried(lambda share=share: over_time(engine, clock, load, rate * share))
    found[LONG] = tried(lambda: long_prompts(engine, clock, load))
    return found


def tried(measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What was measured, or why it was not: the other loads are measured all the same."""
    try:
        return measured()
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def warm_up(engine: Any, load: Load) -> None:
    """Kernels are compiled, and libraries have their workspaces, before anything is measured."""
    params = precast.SamplingParams(max_tokens=max(load.answer_tokens // 8, 1), ignore_eos=True)
    for number, length in ((8, load.prompt_tokens), (2, load.long_prompt_tokens)):
        engine.generate(prompts(number, length, load, seed=-length), params)
    engine.forget_prefixes()


def goals(found: dict[str, Any]) -> dict[str, Any]:
    """By name, what was to be reached and what was; "met" is False where nothing was measured."""
    ratio = found[LONG].get("ratio")
    is_met = ratio is not None and ratio < GOAL_RATIO
    stated = {"inter-token p99 / median while long prompts arrive": (f"< {GOAL_RATIO:g}", ratio, is_met)}
    for name, one in found.items():
        padding = one.get("padding_percent")
        is_met = padding is not None and padding <= GOAL_PADDING
        stated[f"padding, % of computed tokens: {name}"] = (f"<= {GOAL_PADDING:g}", padding, is_met)
    return {name: dict(zip(("goal", "found", "met"), each, strict=True)) for name, each in stated.items()}


def main() -> None:
    """Build, simulate, or measure and write `results/gpu_mixed_load.json`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=Path)
    parser.add_argument("--bundles", type=Path)
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--seconds", type=float, default=Load.seconds, help="for how long requests arrive at each rate")
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "gpu_mixed_load.json")
    arguments = parser.parse_args()
    load = Load(seconds=arguments.seconds)
    if arguments.build:
        build(arguments.build)
        return
    can_measure = torch.cuda.is_available() and arguments.checkpoints is not None
    if arguments.bundles is None or not (arguments.simulate or can_measure):
        print("needs --bundles, and a CUDA GPU and --checkpoints or --simulate: nothing measured")
        return
    bundle = arguments.bundles / f"{SHAPE}.bundle"
    if arguments.simulate:
        print(json.dumps(simulate(bundle, load), indent=2))
        return
    checkpoint = arguments.checkpoints / SHAPE
    if not (checkpoint / "model.safetensors.index.json").exists():
        random_checkpoints.write(Bundle.open(bundle), checkpoint)
        torch.cuda.empty_cache()
    harness.write(arguments.out, "gpu_mixed_load", {SHAPE: measure(bundle, checkpoint, load)})


if __name__ == "__main__":
    main()
