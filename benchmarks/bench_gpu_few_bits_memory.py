"""On a GPU: the device memory that a loaded model takes, beside its checkpoint's bytes and its caches.

Claim: what is published in few bits stays so: a model takes what its files and its caches have, and little more, which
is room for a step, kernels and captured steps. By the driver alone, for 8 sequences and 1,024 tokens a step, with 2 GiB
of caches, after some tokens; what the CUDA context takes by itself is left out. Each load is a process of its own.

    python benchmarks/bench_gpu_few_bits_memory.py [--bundles DIR] [--out FILE] [SHAPE ...]

The bundles are those that `bench_gpu_served.py --build` makes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from support import harness
from support.no_torch import BLOCK
from support.published_bundles import write_checkpoint

from precast.ir.artifact import Bundle

SHAPES = (
    "llama-3.1-8b", "llama-3.1-8b-fp8", "llama-3.1-8b-fp8-blocks", "llama-3.1-8b-int4", "llama-3.1-8b-nvfp4",
    "llama-3.1-8b-gptq", "llama-3.1-8b-awq", "gpt-oss-20b-mxfp4",
)  # fmt: skip
CACHE_BYTES = 2 << 30
LOAD = """
import json, sys
checkpoint, bundle, digest, cache_bytes = sys.argv[1:]
from cuda.bindings import driver
driver.cuInit(0)
context = driver.cuDevicePrimaryCtxRetain(driver.cuDeviceGet(0)[1])[1]
driver.cuCtxSetCurrent(context)
before = driver.cuMemGetInfo()[1]
import precast
engine = precast.load(
    bundle, weights=checkpoint, device="cuda", cache_bytes=int(cache_bytes), allow_config_mismatch=True,
    capture="before", backend="driver", native=digest, max_num_seqs=8, max_num_tokens=1024,
)
engine.generate([[5] * 900, [7] * 10], precast.SamplingParams(max_tokens=16, ignore_eos=True))
print(json.dumps({"device_bytes": before - driver.cuMemGetInfo()[1]}), flush=True)
import os
os._exit(0)
"""


def measured(bundle: Path, checkpoint: Path) -> dict[str, Any]:
    """Of one shape; the checkpoint is written first, and removed in the end."""
    try:
        write_checkpoint(bundle, checkpoint)
        held = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors")) + CACHE_BYTES
        digest = Bundle.open(bundle).digest
        found = harness.fresh_process(BLOCK + LOAD, str(checkpoint), str(bundle), digest, str(CACHE_BYTES))
    except subprocess.CalledProcessError as error:
        return {"failed": error.stderr.strip()[-1500:]}
    finally:
        shutil.rmtree(checkpoint, ignore_errors=True)
    return {"checkpoint_and_cache_bytes": held, **found, "ratio": round(found["device_bytes"] / held, 3)}


def main() -> None:
    """Measure and write `results/gpu_few_bits_memory.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundles", type=Path, default=Path("build/driver"))
    parser.add_argument("--checkpoints", type=Path, default=Path("/dev/shm/precast-checkpoints"))
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "gpu_few_bits_memory.json")
    parser.add_argument("shapes", nargs="*", default=list(SHAPES), metavar="SHAPE")
    arguments = parser.parse_args()
    machine = harness.machine_by_itself()
    figures: dict[str, Any] = {}
    for shape in arguments.shapes:
        figures[shape] = measured(arguments.bundles / f"{shape}.bundle", arguments.checkpoints / shape)
        print(shape, json.dumps(figures[shape]), flush=True)
        text = json.dumps({"claim": "gpu_few_bits_memory", "machine": machine, "figures": figures}, indent=1)
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
