"""On a GPU: what steps take as `precast.load` serves them, by the driver alone and with torch, whole and in few bits.

Claims: a step by the driver alone takes no longer than one with torch; a model published in few bits takes less time a
step than in bfloat16, by about as much as it is smaller. All kernels come from native layers. Shapes are published ones
with random weights; each load is a process of its own, captured before its first step. Beside the times are the bytes
that a step of one sequence moves, and how fast the machine sums 8 GB.

    python benchmarks/bench_gpu_served.py --build DIR [SHAPE ...]       # without a GPU: bundles and native layers
    python benchmarks/bench_gpu_served.py --bundles DIR [--backend driver] [--out FILE] [SHAPE ...]
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from support import harness, served_processes
from support.published_bundles import build, write_checkpoint
from support.served_steps import PROMPT_TOKENS
from support.step_floors import bytes_of_one_token

from precast.ir.artifact import Bundle

SHAPES = (
    "llama-3.1-8b", "llama-3.1-8b-fp8", "llama-3.1-8b-fp8-blocks", "llama-3.1-8b-int4", "llama-3.1-8b-nvfp4",
    "llama-3.1-8b-gptq", "llama-3.1-8b-awq", "gpt-oss-20b-mxfp4", "gemma-3-12b", "qwen3-30b-a3b-half",
)  # fmt: skip
BACKENDS = ("driver", "torch")
READ = """
import json, sys
sys.path.insert(0, sys.argv[1])
from support.gpu_times import read_bytes_per_second
print(json.dumps({"read_bytes_per_second": round(read_bytes_per_second())}))
"""


def measured(bundle: Path, checkpoint: Path, backends: list[str]) -> dict[str, Any]:
    """By each backend, in turn; the checkpoint is written first, and removed in the end."""
    found: dict[str, Any] = {"step_bytes": bytes_of_one_token(Bundle.open(bundle).graph, PROMPT_TOKENS)}
    try:
        write_checkpoint(bundle, checkpoint)
        files = checkpoint.glob("*.safetensors")
        found["checkpoint_bytes"] = sum(file.stat().st_size for file in files)
        for backend in backends:
            found[backend] = served_processes.by_precast(bundle, checkpoint, backend)
            print(f"{bundle.stem}, {backend}: {json.dumps(found[backend])}", flush=True)
    finally:
        shutil.rmtree(checkpoint, ignore_errors=True)
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path)
    parser.add_argument("--bundles", type=Path, default=Path("build/driver"))
    parser.add_argument("--checkpoints", type=Path, default=Path("/dev/shm/precast-checkpoints"))
    parser.add_argument("--backend", choices=BACKENDS, action="append", dest="backends")
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "gpu_served.json")
    parser.add_argument("shapes", nargs="*", default=list(SHAPES), metavar="SHAPE")
    arguments = parser.parse_args()
    if arguments.build:
        arguments.build.mkdir(parents=True, exist_ok=True)
        for shape in arguments.shapes:
            build(arguments.build, shape)
        return
    machine = harness.machine_by_itself()
    figures: dict[str, Any] = harness.fresh_process(READ, served_processes.HERE)
    for shape in arguments.shapes:
        backends = arguments.backends or list(BACKENDS)
        try:
            figures[shape] = measured(arguments.bundles / f"{shape}.bundle", arguments.checkpoints / shape, backends)
        except subprocess.CalledProcessError as error:
            figures[shape] = {"failed": error.stderr.strip()[-1500:]}
        except Exception as error:  # noqa: BLE001 - whatever one shape meets, the others are measured
            figures[shape] = {"failed": repr(error)}
        text = json.dumps({"claim": "gpu_served", "machine": machine, "figures": figures}, indent=1)
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
