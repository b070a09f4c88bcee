"""What all benchmarks share: medians, fresh processes, the machine's description, and where results go.

A benchmark is one file, `bench_<claim>.py`: it measures, compares with a named baseline in the same run, and writes
`results/<claim>.json` with the machine that made it.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"


def median_seconds(run: Callable[[], object], *, runs: int = 7, warm_ups: int = 1) -> float:
    """The median wall-clock seconds of `run`, after `warm_ups` runs that don't count."""
    times = []
    for index in range(warm_ups + runs):
        started = time.perf_counter()
        run()
        if index >= warm_ups:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def fresh_process(code: str, *arguments: str) -> dict[str, Any]:
    """Runs Python code in a new process; what it prints last is the JSON object that comes back."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import torch

    described: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
    }
    if torch.cuda.is_available():
        described["gpu"] = torch.cuda.get_device_name()
    return described


def machine_by_itself() -> dict[str, Any]:
    """The same, asked in a process of its own, so that this one does without torch."""
    code = "import json, sys; sys.path.insert(0, sys.argv[1]); from support import harness; "
    return fresh_process(code + "print(json.dumps(harness.machine()))", str(Path(__file__).parents[1]))


def write(path: Path, claim: str, figures: dict[str, Any]) -> None:
    """Writes a claim's figures with the machine's description, and prints them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"claim": claim, "machine": machine(), "figures": figures}, indent=2)
    path.write_text(text + "\n")
    print(text)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
