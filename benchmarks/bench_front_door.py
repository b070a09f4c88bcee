"""Claim: commands that only look at a bundle answer in 0.3 s, and importing the loader costs little over torch.

Each figure is the median over fresh processes; baselines in the same run are an empty Python and `import torch`.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from support import harness, shapes

RUNS = 7


def process_seconds(*command: str) -> Callable[[], float]:
    """Runs a command once, and gives its wall-clock seconds."""

    def run() -> float:
        started = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        return time.perf_counter() - started

    return run


def medians(runs: dict[str, Callable[[], float]]) -> dict[str, float]:
    """The median of each, taken in turn so that a slow moment hits all alike; the first turn doesn't count."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(RUNS + 1):
        for name, run in runs.items():
            seconds = run()
            if turn:
                times[name].append(seconds)
    return {name: round(statistics.median(values), 3) for name, values in times.items()}


def main() -> None:
    """The 8B shape's bundle, as a user would look at it."""
    import precast

    python = sys.executable
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bundle = str(folder / "b")
        precast.build(shapes.write_config("llama-3.1-8b", folder / "config"), bundle)
        cli = str(Path(python).with_name("precast"))
        seconds = medians(
            {
                "python": process_seconds(python, "-c", "pass"),
                "import_torch": process_seconds(python, "-c", "import torch"),
                "import_torch_and_loader": process_seconds(
                    python, "-c", "import torch, precast.loader.load, precast.loader.engine.engine"
                ),
                "inspect": process_seconds(cli, "inspect", bundle),
                "digest": process_seconds(cli, "digest", bundle),
                "verify": process_seconds(cli, "verify", bundle),
            }
        )
    figures = {
        "seconds": seconds,
        "loader_over_torch_seconds": round(seconds["import_torch_and_loader"] - seconds["import_torch"], 3),
        "goals": {"inspect": 0.3, "digest": 0.3, "loader_over_torch_seconds": 0.15},
        "runs": RUNS,
    }
    harness.write(harness.RESULTS / "front_door.json", "front_door", figures)


if __name__ == "__main__":
    main()
