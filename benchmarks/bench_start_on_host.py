"""What a start without torch does in Python that takes no GPU and no checkpoint, phase by phase.

Claim: it takes less of a processor than `import torch` alone, whatever the model is published in. All of it is in a
start's way where weights are soon there: few bits (docs/start.md). Each run is a fresh process, of which processor time
is counted, so that others on the machine change little; nothing is launched.

    python benchmarks/bench_start_on_host.py [--bundles DIR] [SHAPE ...]

Bundles that are not in DIR are built there, with their native layers; those of `bench_gpu_served.py --build` serve,
too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path

from support import harness
from support.published_bundles import build

SHAPES = ("llama-3.1-8b", "llama-3.1-8b-fp8", "llama-3.1-8b-int4", "gpt-oss-20b-mxfp4")
RUNS = 7
GPU_NAME = "NVIDIA H200"

START = """
import json, sys, time
spent = {}
def passed(name):
    now = time.process_time()
    spent[name], passed.last = now - passed.last, now
passed.last = 0.0
from pathlib import Path
passed("interpreter")
from precast.loader.driver.shared_libraries import import_all
import_all()
import precast.loader.driver.load
from precast.ir.artifact import Bundle
from precast.ir.graph.world import UNSHARDED
from precast.loader.collector import collector_held
from precast.loader.placement import bind_unverified
passed("imports before the bundle")
with collector_held():
    opened = Bundle.open(Path(sys.argv[1]))
    graph = bind_unverified(opened.graph, UNSHARDED)
    passed("bundle")
    from precast.ir.verify import verifier
    from precast.kernels.choices import records_of
    from precast.kernels.measured import table_of
    from precast.kernels.rounded.fusing import with_rounded_inputs
    from precast.kernels.use import GPU
    from precast.loader.driver import coverage, ready
    from precast.loader.sizing import EngineLimits
    for op in opened.manifest.ops.items():
        records_of(*op)
    passed("imports after it")
    limits = EngineLimits(256, 8192, opened.manifest.model.max_seq_len)
    verifier.check(graph)
    graph = ready.with_slabs(graph, limits)
    passed("verified")
    target = GPU._replace(table=table_of(sys.argv[2])).without_torch
    layer = opened.native[target.text]
    passed("native layer read")
    graph = with_rounded_inputs(graph, target)
    model = ready.as_launches(graph, target, opened, layer, limits)
    passed("launches")
    most = coverage.most_sizes(graph, limits)
    assert not any(coverage.lacking(model.program, graph, model.addresses, layer, most))
    passed("kernels looked up")
print(json.dumps(spent))
"""
TORCH = """
import json, time
began = time.process_time()
import torch
print(json.dumps({"import torch": time.process_time() - began}))
"""


def measured(code: str, *arguments: str) -> dict[str, float]:
    """Milliseconds by phase: medians. A first run compiles modules, and doesn't count."""
    runs = [harness.fresh_process(code, *arguments) for _ in range(1 + RUNS)][1:]
    return {name: round(1000 * statistics.median(run[name] for run in runs), 1) for name in runs[0]}


def main() -> None:
    """Measure, and write `results/start_on_host.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundles", type=Path, default=Path("build/driver"))
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "start_on_host.json")
    parser.add_argument("shapes", nargs="*", default=SHAPES)
    arguments = parser.parse_args()
    arguments.bundles.mkdir(parents=True, exist_ok=True)
    for shape in arguments.shapes:
        if not (arguments.bundles / f"{shape}.bundle").exists():
            build(arguments.bundles, shape)
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as compiled:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = compiled
        baseline = measured(TORCH)["import torch"]
        for shape in arguments.shapes:
            phases = measured(START, str(arguments.bundles / f"{shape}.bundle"), GPU_NAME)
            whole = round(sum(phases.values()), 1)
            figures[shape] = {"ms": phases, "ms_in_all": whole, "of_import_torch": round(whole / baseline, 3)}
    harness.write(arguments.out, "start_on_host", {"import_torch_ms": baseline, **figures})


if __name__ == "__main__":
    main()
