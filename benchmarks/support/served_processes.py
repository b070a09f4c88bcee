"""Processes that load a checkpoint and serve steps: of Precast by one of its backends, and of vLLM."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from precast.ir.artifact import Bundle
from support import harness
from support.no_torch import BLOCK

SERVE = """
import json, sys, time
benchmarks, checkpoint, bundle, digest, backend = sys.argv[1:]
sys.path.insert(0, benchmarks)
import precast
from support.served_steps import COUNTS, PROMPTS, decode_ms, prefill
started = time.perf_counter()
engine = precast.load(
    bundle, weights=checkpoint, device="cuda", cache_bytes=24 << 30, allow_config_mismatch=True, capture="before",
    backend=backend, native=digest, max_num_seqs=256, max_num_tokens=8192,
)
found = {"load_seconds": round(time.perf_counter() - started, 2)}
found["decode_ms"] = {str(count): decode_ms(engine, count) for count in COUNTS}
found["prefill_tokens_per_s"] = {f"{n} x {length}": prefill(engine, n, length) for n, length in PROMPTS}
stats = engine.stats
found |= {"compilations": stats.compilations, "steps_not_captured": stats.eager_reasons,
          "capture_seconds": round(stats.capture_seconds, 2), "graphs": stats.graphs}
print(json.dumps(found), flush=True)
import os
os._exit(0)
"""
VLLM = """
import os, sys
benchmarks, checkpoint = sys.argv[1:]
os.environ |= {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
sys.path.insert(0, benchmarks)
from support import vllm_steps
vllm_steps.main(checkpoint)
"""
HERE = str(Path(__file__).parents[1])


def by_precast(bundle: Path, checkpoint: Path, backend: str) -> dict[str, Any]:
    """Steps by this backend; where the process fails, the end of what it said."""
    code = BLOCK + SERVE if backend == "driver" else SERVE
    return _figures(code, str(checkpoint), str(bundle), Bundle.open(bundle).digest, backend)


def by_vllm(checkpoint: Path) -> dict[str, Any]:
    """The same steps by vLLM, of a folder that has the checkpoint's `config.json` too."""
    return _figures(VLLM, str(checkpoint))


def _figures(code: str, *arguments: str) -> dict[str, Any]:
    try:
        return harness.fresh_process(code, HERE, *arguments)
    except subprocess.CalledProcessError as error:
        return {"failed": error.stderr.strip()[-1500:]}
