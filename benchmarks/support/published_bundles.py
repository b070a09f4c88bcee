"""Bundles of published shapes with native layers, and checkpoints for them: for processes that do without torch."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

TARGET = "sm_90"


def build(folder: Path, shape: str) -> None:
    """The bundle of a shape, with its layer."""
    import precast
    from support import shapes

    began = time.perf_counter()
    source = shapes.write_config(shape, folder / f"{shape}.config")
    made = precast.build(source, folder / f"{shape}.bundle", max_seq_len=8192, targets=[TARGET])
    layer = made.native[TARGET]
    size = sum(map(len, layer.images.values()))
    print(f"{shape}: {len(layer.kernels)} kernels, {size >> 10} KiB, {time.perf_counter() - began:.0f} s", flush=True)


def write_checkpoint(bundle: Path, folder: Path) -> None:
    """Random weights, by a process of its own, which imports torch."""
    write = (
        "import sys; sys.path.insert(0, sys.argv[1]); from support import random_checkpoints; "
        "from pathlib import Path; from precast.ir.artifact import Bundle; "
        "random_checkpoints.write(Bundle.open(sys.argv[2]), Path(sys.argv[3]))"
    )
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", write, Path(__file__).parents[1], bundle, folder], check=True)
    print(f"checkpoint written in {time.perf_counter() - began:.1f} s", flush=True)
