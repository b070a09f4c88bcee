"""Claim: models of many experts, latent attention and states build from their configs alone as dense ones do: the
graph's size and the build's time don't depend on how many experts a layer has, and quantised checkpoints cost nothing.

Each build is a fresh process, from its start to its end. The baseline in the same run is the build of Llama-3.1-8B.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from bench_build import BUILD
from support import harness, shapes

BASELINE = "llama-3.1-8b"
SHAPES = (
    "qwen3-235b-a22b",
    "deepseek-v3",
    "qwen3-next-80b-a3b",
    "nemotron-h-56b",
    "gemma-4-26b-a4b",
    "gpt-oss-120b",
    "glm-4.7-flash",
)
GOALS = {"seconds": 60, "peak_gib": 4, "bundle_bytes": 500_000}
RUNS = 3


def measure(shape: str, folder: Path) -> dict[str, Any]:
    """Medians over fresh processes."""
    config = shapes.write_config(shape, folder / shape)
    runs = [harness.fresh_process(BUILD, str(config), str(folder / f"{shape}.bundle")) for _ in range(RUNS)]
    seconds, peak = (statistics.median(run[key] for run in runs) for key in ("seconds", "peak_gib"))
    return {"seconds": round(seconds, 1), "peak_gib": round(peak, 2), "bundle_bytes": runs[0]["bundle_bytes"]}


def main() -> None:
    """All shapes, and the baseline."""
    with tempfile.TemporaryDirectory() as folder:
        found = {shape: measure(shape, Path(folder)) for shape in (BASELINE, *SHAPES)}
    for figures in found.values():
        figures["ratio_to_baseline"] = round(figures["seconds"] / found[BASELINE]["seconds"], 2)
        figures["meets_goals"] = all(figures[name] <= goal for name, goal in GOALS.items())
    harness.write(
        harness.RESULTS / "build_families.json", "build_families", {"goals": GOALS, "runs": RUNS, "builds": found}
    )


if __name__ == "__main__":
    main()
