"""On two GPUs: what a bundle's steps take with its layers on both, and with `--alone` on one; with random weights.

Claims: two ranks decode and prefill faster than one; each reads its share of the checkpoint; the tokens are the same.
A world is loaded once, in a process of its own, and measured with all numbers of sequences. What it finds is printed,
and written, as it comes. With `--profile` it says besides which kernels a decode step of rank 0 consists of.

    python benchmarks/bench_gpu_tensor_parallel.py --build DIR [SHAPE ...]                  # on any machine
    python benchmarks/bench_gpu_tensor_parallel.py --bundles DIR [--checkpoints DIR] [--alone] [--profile] [SHAPE ...]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from support import harness, random_checkpoints, shapes

WORLDS: dict[str, tuple[tuple[int, int], ...]] = {
    "llama-3.1-8b": ((2, 1),),
    "qwen3-30b-a3b-half": ((2, 1), (2, 2)),
}
BATCHES = (1, 8, 64, 256)
PROMPT_TOKENS, WINDOW = 128, 12
CACHE_BYTES = 12 << 30
CASE_SECONDS = 120
"""A world that takes longer is ended; what it has found until then stays."""


def build(folder: Path, names: list[str]) -> None:
    """The bundles in bfloat16."""
    import precast

    for name in names:
        source = shapes.write_config(name, folder / f"{name}.config")
        began = time.perf_counter()
        bundle = precast.build(source, folder / f"{name}.bundle", dtype="bfloat16", max_seq_len=8192)
        worlds = ", ".join(f"tp {world.tp} ep {world.ep}" for world in bundle.graph.shards.worlds)
        print(f"{name}: {time.perf_counter() - began:.1f} s, {worlds}", flush=True)


class Case(NamedTuple):
    """What one world is measured with; `out` is written after each figure."""

    bundle: Path
    checkpoint: Path
    tp: int
    ep: int
    profiles: bool
    out: Path

    def tell(self, found: dict[str, Any]) -> None:
        """Write what was found so far, and print what came last."""
        self.out.write_text(json.dumps(found))
        name, value = list(found.items())[-1]
        print(f"{self.checkpoint.name} tp {self.tp} ep {self.ep}: {name} {value}", flush=True)


def measure_case(case: Case) -> None:
    """What one world takes."""
    import precast

    began = time.perf_counter()
    engine = precast.load(
        case.bundle, weights=case.checkpoint, device="cuda", tp=case.tp, ep=case.ep,
        cache_bytes=CACHE_BYTES // case.tp, timeouts={"join": 60, "step": 60}, capture="before",
    )  # fmt: skip
    phases = {phase.name: phase for phase in engine.timeline.phases}
    found: dict[str, Any] = {"load_s": round(time.perf_counter() - began, 2)}
    found["phases_s"] = {name: round(phase.seconds or 0, 2) for name, phase in phases.items()}
    found["weights"] = phases["weights"].counters
    stats = engine.stats
    found["captured"] = {"sizes": stats.graphs, "seconds": round(stats.capture_seconds, 1)}
    case.tell(found)
    decoded = {}
    for count in BATCHES:
        decoded[str(count)] = decode_ms(engine, count)
        case.tell({**found, "decode_ms": decoded})
    found["decode_ms"] = decoded
    found["prefill_tokens_per_s"] = prefill(engine)
    case.tell(found)
    found["tokens"] = tokens(engine)
    found["eager"] = engine.stats.eager_reasons
    case.tell(found)
    if case.profiles:
        for count in (1, 64):
            found[f"profile {count}"] = profiled(engine, count)
            case.tell(found)
    engine.close()


def profiled(engine: Any, count: int, steps: int = 8) -> dict[str, list[float]]:
    """The kernels of decode steps: how many in a step, and microseconds of one."""
    import torch

    with decoding(engine, count), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    return {event.key[:40]: [round(event.count / steps, 1), round(event.self_device_time_total / event.count, 2)]
            for event in events[:14]}  # fmt: skip


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Token ids, the same in every run."""
    import random

    draw = random.Random(seed)
    return [[draw.randrange(5, 100_000) for _ in range(length)] for _ in range(count)]


@contextmanager
def decoding(engine: Any, count: int) -> Iterator[None]:
    """While so many sequences decode, and nothing else."""
    import precast

    params = precast.SamplingParams(max_tokens=1000, ignore_eos=True)
    numbers = [engine.submit(prompt, params) for prompt in prompts(count, PROMPT_TOKENS, count)]
    before = engine.stats.tokens_decoded
    while engine.stats.tokens_decoded == before or engine.stats.requests_waiting or engine._scheduler._chunked:
        engine.step()
    for _ in range(4):
        engine.step()
    yield
    for number in numbers:
        engine.cancel(number)
    while engine.has_work:
        engine.step()


def decode_ms(engine: Any, count: int) -> float:
    """The median of a step of `count` sequences that decode, as served: one step is launched ahead."""
    times = []
    with decoding(engine, count):
        for _ in range(8):
            started = time.perf_counter()
            for _ in range(WINDOW):
                engine.step()
            times.append(1000 * (time.perf_counter() - started) / WINDOW)
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


def first_tokens(bundle: Path, checkpoint: Path, tp: int, ep: int, runs: int = 3) -> dict[str, Any]:
    """Seconds from a new process to its first token, and of its phases; kernels are compiled, files in memory."""
    from precast.bench import startup

    command = [sys.executable, "-m", "precast", "run", str(bundle), "--weights", str(checkpoint), "--device", "cuda"]
    command += ["--tp", str(tp), "--ep", str(ep), "--token-ids", "1", "--max-tokens", "1", "--ignore-eos", "--json"]
    asked = startup.participants(bundle, checkpoint, [], "cuda", (), None)[0]._replace(command=tuple(command))
    starts = sorted(startup.start(asked, CASE_SECONDS) for _ in range(runs))
    median = starts[runs // 2]
    phases = {phase: round(seconds, 2) for phase, seconds in median.phases.items() if seconds}
    return {"seconds": [round(start.seconds, 2) for start in starts], "phases_s": phases}


def measure(name: str, worlds: Sequence[tuple[int, int]], given: argparse.Namespace, found: dict[str, Any]) -> None:
    """All these worlds of a shape; `found` is written after each."""
    from precast.ir.artifact import Bundle

    bundle, checkpoint = given.bundles / f"{name}.bundle", given.checkpoints / name
    if not (checkpoint / "model.safetensors.index.json").exists():
        began = time.perf_counter()
        random_checkpoints.write(Bundle.open(bundle), checkpoint)
        print(f"{name}: a checkpoint in {time.perf_counter() - began:.1f} s", flush=True)
    answers = []
    for tp, ep in worlds:
        label = f"tp {tp}" if ep == 1 else f"tp {tp}, ep {ep}"
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "found.json"
            command = [sys.executable, __file__, "--case", str(bundle), str(checkpoint), str(tp), str(ep)]
            command += [str(int(given.profile)), str(out)]
            error = ""
            try:
                subprocess.run(command, check=True, timeout=CASE_SECONDS)
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as failed:
                error = f"{type(failed).__name__}: {failed}"[-200:]
                print(f"{name} {label}: {error}", flush=True)
            one = json.loads(out.read_text()) if out.exists() else {}
        try:
            one["first_token"] = first_tokens(bundle, checkpoint, tp, ep)
            print(f"{name} {label}: first_token {one['first_token']}", flush=True)
        except Exception as failed:  # noqa: BLE001 - whatever it is, the other figures stay
            error = error or f"{type(failed).__name__}: {failed}"[-200:]
        answers.append(one.pop("tokens", []))
        one["first_tokens_equal"] = sum(a[:1] == b[:1] for a, b in zip(answers[0], answers[-1], strict=False))
        found.setdefault(name, {})[label] = one | ({"error": error} if error else {})
        with contextlib.redirect_stdout(io.StringIO()):
            harness.write(given.out, "gpu_tensor_parallel", found)


def main() -> None:
    """Build, or measure and write `results/gpu_tensor_parallel.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, metavar="DIR")
    parser.add_argument("--bundles", type=Path, metavar="DIR")
    parser.add_argument("--checkpoints", type=Path, default=Path("/dev/shm/precast-checkpoints"), metavar="DIR")
    parser.add_argument("--alone", action="store_true", help="on one GPU first")
    parser.add_argument("--profile", action="store_true", help="the kernels of a decode step, too")
    parser.add_argument("--case", nargs=6, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "gpu_tensor_parallel.json")
    parser.add_argument("shapes", nargs="*", default=list(WORLDS))
    arguments = parser.parse_args()
    if arguments.build:
        build(arguments.build, arguments.shapes)
        return
    if arguments.case:
        bundle, checkpoint, tp, ep, profiles, out = arguments.case
        measure_case(Case(Path(bundle), Path(checkpoint), int(tp), int(ep), profiles == "1", Path(out)))
        return
    import torch

    if torch.cuda.device_count() < 2 or arguments.bundles is None:
        print("needs two CUDA GPUs, and --bundles: nothing measured")
        return
    found: dict[str, Any] = {}
    for name in arguments.shapes:
        worlds = (*([(1, 1)] if arguments.alone else []), *WORLDS[name])
        measure(name, worlds, arguments, found)


if __name__ == "__main__":
    main()
