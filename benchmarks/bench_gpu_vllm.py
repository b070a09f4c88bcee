"""On a GPU with vLLM installed: what steps take as vLLM serves them, beside Precast by the driver, from one checkpoint.

Claim: a step of up to 64 sequences takes less time than vLLM's, in bfloat16 and in few bits; steps of 256 and prompts
are beside it. Both load the same files of random weights at published shapes, hold 24 GiB of caches, take up to 256
sequences and 8,192 tokens a step, and decode greedily; each is a process of its own. vLLM runs as it comes, with steps
compiled, and captured for the counts that are measured.

    python benchmarks/bench_gpu_vllm.py [--bundles DIR] [--out FILE] [SHAPE ...]

The bundles are those that `bench_gpu_served.py --build` makes.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from support import harness, served_processes
from support.published_bundles import write_checkpoint

SHAPES = ("llama-3.1-8b", "llama-3.1-8b-fp8", "llama-3.1-8b-int4", "gpt-oss-20b-mxfp4")


def measured(bundle: Path, checkpoint: Path) -> dict[str, Any]:
    """By each, in turn; the checkpoint is written first, and removed in the end."""
    try:
        write_checkpoint(bundle, checkpoint)
        shutil.copy(bundle.with_suffix(".config") / "config.json", checkpoint)
        return {"precast": served_processes.by_precast(bundle, checkpoint, "driver"),
                "vllm": served_processes.by_vllm(checkpoint)}  # fmt: skip
    finally:
        shutil.rmtree(checkpoint, ignore_errors=True)


def ratios(found: dict[str, Any]) -> dict[str, Any]:
    """Precast's steps by vLLM's, by sequences; its prompts' tokens a second by vLLM's."""
    ours, theirs = found["precast"], found["vllm"]
    return {
        key: {name: round(value / theirs[key][name], 3) for name, value in ours[key].items()}
        for key in ("decode_ms", "prefill_tokens_per_s")
        if key in ours and key in theirs
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundles", type=Path, default=Path("build/driver"))
    parser.add_argument("--checkpoints", type=Path, default=Path("/dev/shm/precast-checkpoints"))
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "gpu_vllm.json")
    parser.add_argument("shapes", nargs="*", default=list(SHAPES), metavar="SHAPE")
    arguments = parser.parse_args()
    machine = harness.machine_by_itself()
    figures: dict[str, Any] = {}
    for shape in arguments.shapes:
        found = measured(arguments.bundles / f"{shape}.bundle", arguments.checkpoints / shape)
        figures[shape] = found | {"precast by vllm": ratios(found)}
        print(f"{shape}: {json.dumps(figures[shape])}", flush=True)
        text = json.dumps({"claim": "gpu_vllm", "machine": machine, "figures": figures}, indent=1)
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
