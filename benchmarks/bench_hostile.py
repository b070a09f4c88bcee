"""Claim: every command on a hostile bundle or checkpoint ends within about a second and 200 MB, with an answer or a
clean error.

Each command runs in a fresh process, a load up to where it would read tensors; the baseline in the same run is the
command on an honest bundle. Names as arguments choose the cases, and then nothing is written.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from support import harness, hostile

GOALS = {"seconds": 1.0, "peak_mb": 200}
_LOAD = (
    "import sys; from precast.ir.artifact import Bundle; from precast.ir.weights import config_facts, fit; "
    "from precast.ir.weights.checkpoint import CheckpointFiles; from precast.loader.weights.parts import param_parts; "
    "from precast.loader.weights.read_plan import plan_reads; from precast.ir.errors import PrecastError\n"
    "try:\n"
    "    bundle = Bundle.open(sys.argv[1]); files = CheckpointFiles.open(sys.argv[2])\n"
    "    config_facts.check(bundle.manifest.config, sys.argv[2])\n"
    "    stored = fit.require(bundle.graph, bundle.manifest.checkpoint, files)\n"
    "    plan_reads(param_parts(bundle.graph.params, lambda name: stored[name].dtype), stored.__getitem__)\n"
    "except PrecastError as error: sys.exit(str(error))"
)
_RUN = """
import json, resource, subprocess, sys, time
started = time.perf_counter()
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps({
    "seconds": time.perf_counter() - started, "processor_seconds": used.ru_utime + used.ru_stime,
    "peak_mb": used.ru_maxrss / 1024, "rc": done.returncode, "tail": done.stderr[-300:],
}))
"""


def commands(bundle: Path, checkpoint: Path) -> dict[str, list[str]]:
    """Every command that opens a bundle or a checkpoint."""
    precast = [sys.executable, "-m", "precast"]
    flags = ["--graph", "--passes", "--weights", "--cache", "--kernels", "--capture"]
    return {
        "digest": [*precast, "digest", str(bundle)],
        "inspect": [*precast, "inspect", str(bundle)],
        "inspect with all flags": [*precast, "inspect", str(bundle), *flags],
        "diff": [*precast, "diff", str(bundle), str(bundle)],
        "verify": [*precast, "verify", str(bundle)],
        "verify --weights": [*precast, "verify", str(bundle), "--weights", str(checkpoint)],
        "load before weights": [sys.executable, "-c", _LOAD, str(bundle), str(checkpoint)],
    }


def measure(command: list[str]) -> dict[str, Any]:
    """Seconds and peak memory of a command in a fresh process, and how it ended."""
    found = harness.fresh_process(_RUN, *command)
    clean = found["rc"] in (0, 1, 3) and "Traceback" not in found["tail"]
    return {
        "seconds": round(found["seconds"], 2),
        "processor_seconds": round(found["processor_seconds"], 2),
        "peak_mb": round(found["peak_mb"]),
        "exit_code": found["rc"],
        "clean": clean,
    }


def main() -> None:
    """All cases, or those named."""
    chosen = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        honest = hostile.write(root / "honest", hostile.params(100))
        tensors = {f"p{i}": {"dtype": "F32", "shape": [4], "data_offsets": [16 * i, 16 * i + 16]} for i in range(100)}
        fitting = hostile.safetensors(root / "fitting", tensors, bytes(1600))
        one = hostile.one_tensor(root / "one")
        cases = {"honest": (honest, fitting)}
        for index, (name, make) in enumerate([*hostile.BUNDLES.items(), *hostile.CHECKPOINTS.items()]):
            if chosen and name not in chosen:
                continue
            made = make(root / f"case{index}")
            beside = one if name in hostile.ONE_TENSOR else fitting
            cases[name] = (made, beside) if name in hostile.BUNDLES else (honest, made)
        figures: dict[str, Any] = {"goals": GOALS, "cases": {}}
        for name, (bundle, checkpoint) in cases.items():
            found = {verb: measure(command) for verb, command in commands(bundle, checkpoint).items()}
            figures["cases"][name] = found
            print(name, {verb: tuple(each.values()) for verb, each in found.items()}, file=sys.stderr, flush=True)
    refused = [verb for verb, each in figures["cases"]["honest"].items() if each["exit_code"] not in (0, 1)]
    assert not refused, f"the honest bundle, beside which checkpoints are tried, is refused by {refused}"
    worst = [each for found in figures["cases"].values() for each in found.values()]
    figures["worst"] = {key: max(each[key] for each in worst) for key in ("seconds", "processor_seconds", "peak_mb")}
    figures["all_clean"] = all(each["clean"] for each in worst)
    if not chosen:
        harness.write(harness.RESULTS / "hostile.json", "hostile", figures)


if __name__ == "__main__":
    main()
