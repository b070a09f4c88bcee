"""Claim: the kernels of a model are compiled ahead, without a GPU, in a minute on two cores, and take at most 3 MB.

For each target: the layer of the graph of an 8B model, compiled anew (no cache of Triton's), its bytes as they are
stored and unpacked, and the seconds of the clock and of all processors. The machine may be doing other things: the
processors' seconds are what it costs.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from support import harness, shapes

from precast.builder.build import build
from precast.builder.native.layer import native_layer, target_named, what_is_left
from precast.ir import encoding
from precast.ir.graph.schema import Graph

SHAPE = "llama-3.1-8b"
TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
GOAL_BYTES, GOAL_SECONDS, GOAL_CORES = 3_000_000, 60, 2


def measure(graph: Graph, name: str) -> dict[str, Any]:
    """One target's layer."""
    target, before, started = target_named(name), _processor_seconds(), time.perf_counter()
    layer = native_layer(graph, target)
    compiled = time.perf_counter() - started
    stored = encoding.encode_native(layer)
    seconds, used = time.perf_counter() - started, _processor_seconds() - before
    return {
        "bytes": len(stored),
        "goal_bytes": GOAL_BYTES,
        "image_bytes": sum(map(len, layer.images.values())),
        "kernels": len(layer.kernels),
        "images": len(layer.images),
        "seconds": round(seconds, 1),
        "compile_seconds": round(compiled, 1),
        "processor_seconds": round(used, 1),
        "goal_processor_seconds": GOAL_SECONDS * GOAL_CORES,
        "compilers": layer.compilers,
        "cuda": layer.driver,
        "compiled_where_they_run": list(what_is_left(graph, target)),
    }


def _processor_seconds() -> float:
    """Of this process and all that it has waited for."""
    each = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in each)


def main() -> None:
    """Writes `results/native.json`; with names of targets, of these alone."""
    with tempfile.TemporaryDirectory() as folder:
        config = shapes.write_config(SHAPE, Path(folder) / SHAPE)
        graph = build(config, Path(folder) / "bundle").graph
    figures = {name: measure(graph, name) for name in sys.argv[1:] or TARGETS}
    harness.write(harness.RESULTS / "native.json", "native", {SHAPE: figures})


if __name__ == "__main__":
    main()
