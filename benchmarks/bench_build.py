"""Claim: a build from the config alone takes seconds and little memory, on a CPU, without weights.

Each build is a fresh process, from its start to its end: the command that a user types. The baseline in the same run
is what a build cannot do without: starting Python with torch and transformers, and `torch.export` of the same model.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from support import harness, shapes

GOALS = {"llama-3.1-8b": (20.0, 2.0), "llama-3.1-405b": (60.0, 4.0)}
RUNS = {"llama-3.1-8b": 3, "llama-3.1-405b": 1}

BUILD = """
import json, resource, sys, time
started = time.perf_counter()
import precast
bundle = precast.build(sys.argv[1], sys.argv[2])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
size = sum(blob.size for blob in bundle.manifest.blobs)
print(json.dumps({"seconds": time.perf_counter() - started, "peak_gib": peak, "bundle_bytes": size}))
"""

_EXPORT = """
import json, sys, time
started = time.perf_counter()
import torch
from transformers import AutoConfig, AutoModelForCausalLM
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]), dtype=torch.bfloat16)
imported = time.perf_counter() - started
tokens = torch.export.Dim("T", min=2, max=4096)
ids = torch.zeros(1, 7, dtype=torch.int64, device="meta")
torch.export.export(
    model.eval(), (), kwargs={"input_ids": ids, "use_cache": False},
    dynamic_shapes={"input_ids": {1: tokens}, "use_cache": None}, strict=False,
)
print(json.dumps({"import_seconds": imported, "seconds": time.perf_counter() - started}))
"""


def measure(shape: str, folder: Path) -> dict[str, Any]:
    """Medians over fresh processes, beside the goal and the baseline."""
    config = shapes.write_config(shape, folder / shape)
    runs = [harness.fresh_process(BUILD, str(config), str(folder / "bundle")) for _ in range(RUNS[shape])]
    export = harness.fresh_process(_EXPORT, str(config))
    seconds, peak = (statistics.median(run[key] for run in runs) for key in ("seconds", "peak_gib"))
    goal_seconds, goal_gib = GOALS[shape]
    return {
        "seconds": round(seconds, 2),
        "goal_seconds": goal_seconds,
        "peak_gib": round(peak, 2),
        "goal_peak_gib": goal_gib,
        "bundle_bytes": runs[0]["bundle_bytes"],
        "runs": len(runs),
        "baseline_import_and_export_seconds": round(export["seconds"], 2),
        "ratio_to_baseline": round(seconds / export["seconds"], 2),
    }


def main() -> None:
    """Both shapes."""
    with tempfile.TemporaryDirectory() as folder:
        figures = {shape: measure(shape, Path(folder)) for shape in GOALS}
    harness.write(harness.RESULTS / "build.json", "build", figures)


if __name__ == "__main__":
    main()
