"""On two GPUs: one bundle with tp 2 against the same bundle with tp 1, from its load to its steps, with random weights.

Claims: two ranks decode and prefill faster than one; each reads its share of the checkpoint; the tokens are the same.
Every case is a process of its own, and what it found is written as it comes.

    python benchmarks/bench_gpu_tensor_parallel.py --build DIR [SHAPE ...]                  # on any machine
    python benchmarks/bench_gpu_tensor_parallel.py --bundles DIR [--checkpoints DIR] [SHAPE ...]    # on two GPUs
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import harness
import random_checkpoints
import shapes

WORLDS: dict[str, tuple[tuple[int, int], ...]] = {
    "llama-3.1-8b": ((1, 1), (2, 1)),
    "qwen3-30b-a3b-half": ((1, 1), (2, 1), (2, 2)),
}
BATCHES = (1, 8, 64, 256)
PROMPT_TOKENS, WINDOW = 128, 12
CACHE_BYTES = 16 << 30
CASE_SECONDS = 150
"""A case that takes longer is ended, and said to have failed."""


def build(folder: Path, names: list[str]) -> None:
    """The bundles in bfloat16."""
    import precast

    for name in names:
        source = shapes.write_config(name, folder / f"{name}.config")
        began = time.perf_counter()
        bundle = precast.build(source, folder / f"{name}.bundle", dtype="bfloat16", max_seq_len=8192)
        worlds = ", ".join(f"tp {world.tp} ep {world.ep}" for world in bundle.graph.shards.worlds)
        print(f"{name}: {time.perf_counter() - began:.1f} s, {worlds}", flush=True)


def case(bundle: Path, checkpoint: Path, tp: int, ep: int) -> dict[str, Any]:
    """What one world takes."""
    import precast

    began = time.perf_counter()
    engine = precast.load(
        bundle, weights=checkpoint, device="cuda", tp=tp, ep=ep, cache_bytes=CACHE_BYTES // tp,
        timeouts={"join": 60, "step": 60},
    )  # fmt: skip
    phases = {phase.name: phase for phase in engine.timeline.phases}
    found: dict[str, Any] = {
        "load_s": round(time.perf_counter() - began, 2),
        "weights_s": round(phases["weights"].seconds or 0, 2),
        "weights": phases["weights"].counters,
    }
    _tell(tp, ep, found)
    engine.generate([[1, 15, 27]], precast.SamplingParams(max_tokens=1))
    engine.wait_until_captured()
    stats = engine.stats
    found["captured"] = {"sizes": stats.graphs, "seconds": round(stats.capture_seconds, 1)}
    found["decode_ms"] = {}
    for count in BATCHES:
        found["decode_ms"][str(count)] = decode_ms(engine, count)
        _tell(tp, ep, {count: found["decode_ms"][str(count)]})
    found["prefill_tokens_per_s"] = prefill(engine)
    found["tokens"] = tokens(engine)
    found["eager"] = engine.stats.eager_reasons
    engine.close()
    return found


def _tell(tp: int, ep: int, found: dict[Any, Any]) -> None:
    print(f"tp {tp} ep {ep}: {found}", file=sys.stderr, flush=True)


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Token ids, the same in every run."""
    import random

    draw = random.Random(seed)
    return [[draw.randrange(5, 100_000) for _ in range(length)] for _ in range(count)]


def decode_ms(engine: Any, count: int) -> float:
    """The median of a step of `count` sequences that decode, as served: one step is launched ahead."""
    import precast

    params = precast.SamplingParams(max_tokens=1000, ignore_eos=True)
    numbers = [engine.submit(prompt, params) for prompt in prompts(count, PROMPT_TOKENS, count)]
    while engine.stats.tokens_decoded == 0 or engine.stats.requests_waiting or engine._scheduler._chunked:
        engine.step()
    for _ in range(4):
        engine.step()
    times = []
    for _ in range(6):
        started = time.perf_counter()
        for _ in range(WINDOW):
            engine.step()
        times.append(1000 * (time.perf_counter() - started) / WINDOW)
    for number in numbers:
        engine.cancel(number)
    while engine.has_work:
        engine.step()
    return round(statistics.median(times), 3)


def prefill(engine: Any, length: int = 4096) -> float:
    """Tokens a second of one prompt."""
    import precast

    rates = []
    for run in range(5):
        engine.forget_prefixes()
        engine.submit(prompts(1, length, 1000 + run)[0], precast.SamplingParams(max_tokens=1))
        started = time.perf_counter()
        while engine.has_work:
            engine.step()
        rates.append(length / (time.perf_counter() - started))
    return round(statistics.median(rates), 1)


def tokens(engine: Any) -> list[list[int]]:
    """Greedy answers to prompts of unequal length that run together."""
    import precast

    asked = [prompt[: 5 + 31 * i] for i, prompt in enumerate(prompts(8, 300, 8))]
    params = precast.SamplingParams(max_tokens=16, ignore_eos=True)
    return [output.token_ids for output in engine.generate(asked, params)]


def first_token(bundle: Path, checkpoint: Path, tp: int, ep: int) -> float:
    """Seconds from the first line of `precast run` to its first token, after others have compiled the kernels."""
    command = [
        "-P",
        "-m",
        "precast",
        "run",
        str(bundle),
        "--weights",
        str(checkpoint),
        "--device",
        "cuda",
        "--token-ids",
    ]
    command += ["1,15,27", "--max-tokens", "1", "--json", "--tp", str(tp), "--ep", str(ep)]
    timeline = json.loads(_ended([sys.executable, *command]))["timeline"]
    return round(float(timeline["total_seconds"]), 2)


def _ended(command: list[str]) -> str:
    """The last line that a process prints; its errors are this one's."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=CASE_SECONDS)
    return done.stdout.splitlines()[-1]


def measure(name: str, bundles: Path, checkpoints: Path, found: dict[str, Any], out: Path) -> None:
    """All worlds of a shape; `found` is written after each."""
    from precast.ir.artifact import Bundle

    bundle, checkpoint = bundles / f"{name}.bundle", checkpoints / name
    if not (checkpoint / "model.safetensors.index.json").exists():
        random_checkpoints.write(Bundle.open(bundle), checkpoint)
    answers = []
    for tp, ep in WORLDS[name]:
        label = f"tp {tp}" if ep == 1 else f"tp {tp}, ep {ep}"
        command = [sys.executable, __file__, "--case", str(bundle), str(checkpoint), str(tp), str(ep)]
        try:
            one = json.loads(_ended(command))
            answers.append(one.pop("tokens"))
            one["first_tokens_equal"] = sum(a[0] == b[0] for a, b in zip(answers[0], answers[-1], strict=True))
            one["first_token_s"] = first_token(bundle, checkpoint, tp, ep)
        except Exception as error:  # noqa: BLE001 - one world must not stop the others
            one = {"error": f"{type(error).__name__}: {error}"[:300]}
        found.setdefault(name, {})[label] = one
        harness.write(out, "gpu_tensor_parallel", found)


def main() -> None:
    """Build, or measure and write `results/gpu_tensor_parallel.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, metavar="DIR")
    parser.add_argument("--bundles", type=Path, metavar="DIR")
    parser.add_argument("--checkpoints", type=Path, default=Path("/dev/shm/precast-checkpoints"), metavar="DIR")
    parser.add_argument("--case", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "gpu_tensor_parallel.json")
    parser.add_argument("shapes", nargs="*", default=list(WORLDS))
    arguments = parser.parse_args()
    if arguments.build:
        build(arguments.build, arguments.shapes)
        return
    if arguments.case:
        bundle, checkpoint, tp, ep = arguments.case
        print(json.dumps(case(Path(bundle), Path(checkpoint), int(tp), int(ep))))
        return
    import torch

    if torch.cuda.device_count() < 2 or arguments.bundles is None:
        print("needs two CUDA GPUs, and --bundles: nothing measured")
        return
    found: dict[str, Any] = {}
    for name in arguments.shapes:
        measure(name, arguments.bundles, arguments.checkpoints, found, arguments.out)


if __name__ == "__main__":
    main()
