"""On a GPU: what HTTP adds to the engine.

Claim: `precast serve` answers many clients in about the time that `generate` takes for the same prompts in a process
without HTTP, and is ready soon after it is started. Both run by the driver, from a bundle's native layer, with random
weights.

    python benchmarks/bench_gpu_serve.py --build DIR            # without a GPU: the bundle and its native layer
    python benchmarks/bench_gpu_serve.py --bundles DIR [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from bench_serve import served, stream_all
from support import harness
from support.published_bundles import build, write_checkpoint

from precast.ir.artifact import Bundle

SHAPE = "llama-3.1-8b-fp8"
COUNTS = (1, 8, 64, 256)
PROMPT_TOKENS, TOKENS = 32, 128
RUNS, SINGLE_TOKENS = 4, 30
"""Of four runs the second fastest counts."""
CACHE_BYTES = 24 << 30
GENERATE = """
import json, statistics, sys, time
began = time.perf_counter()
import precast
bundle, weights, digest, cache_bytes, prompt_tokens, tokens, runs, *counts = sys.argv[1:]
engine = precast.load(bundle, weights=weights, device="cuda", backend="driver", native=digest,
                      cache_bytes=int(cache_bytes), allow_config_mismatch=True)
found = {"load_seconds": time.perf_counter() - began}
params = precast.SamplingParams(max_tokens=int(tokens), temperature=0, ignore_eos=True)
def run(count):
    began = time.perf_counter()
    engine.generate([[1 + i] * int(prompt_tokens) for i in range(count)], params)
    return time.perf_counter() - began
for count in map(int, counts):
    found[str(count)] = statistics.median_low(run(count) for _ in range(int(runs)))
print(json.dumps(found), flush=True)
import os
os._exit(0)
"""


def bodies(count: int) -> list[dict[str, Any]]:
    """Requests with the prompts that `GENERATE` has, too."""
    return [
        {"prompt": [1 + i] * PROMPT_TOKENS, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        for i in range(count)
    ]  # fmt: skip


def over_http(bundle: Path, checkpoint: Path) -> dict[str, float]:
    """Seconds until the server is ready, and for so many answers at once."""
    command = [
        sys.executable, "-m", "precast", "serve", bundle, "--weights", checkpoint, "--device", "cuda", "--backend",
        "driver", "--allow-native", Bundle.open(bundle).digest, "--cache-bytes", CACHE_BYTES,
        "--allow-config-mismatch", "--port", "0", "--json",
    ]  # fmt: skip
    began = time.perf_counter()
    with served(list(map(str, command))) as place:
        found = {"ready_seconds": time.perf_counter() - began}
        for count in COUNTS:
            found[str(count)] = statistics.median_low(stream_all(place, bodies(count)) for _ in range(RUNS))
        found["first_token_seconds"] = statistics.median(
            stream_all(place, [body | {"max_tokens": 1} for body in bodies(1)]) for _ in range(SINGLE_TOKENS)
        )
    return found


def measured(bundle: Path, checkpoint: Path) -> dict[str, Any]:
    """The figures, of a checkpoint that is written first, and removed in the end."""
    try:
        write_checkpoint(bundle, checkpoint)
        http = over_http(bundle, checkpoint)
        numbers = map(str, (CACHE_BYTES, PROMPT_TOKENS, TOKENS, RUNS, *COUNTS))
        alone = harness.fresh_process(GENERATE, str(bundle), str(checkpoint), Bundle.open(bundle).digest, *numbers)
    finally:
        shutil.rmtree(checkpoint, ignore_errors=True)
    answers = {
        count: {
            "seconds": round(http[count], 3), "generate_seconds": round(alone[count], 3),
            "ratio": round(http[count] / alone[count], 3),
            "tokens_per_second": round(int(count) * TOKENS / http[count]),
        }
        for count in map(str, COUNTS)
    }  # fmt: skip
    return {
        "shape": SHAPE, "prompt_tokens": PROMPT_TOKENS, "tokens": TOKENS, "answers": answers,
        "first_token_ms": round(1000 * http["first_token_seconds"], 2),
        "ready_seconds": round(http["ready_seconds"], 2), "load_seconds": round(alone["load_seconds"], 2),
    }  # fmt: skip


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path)
    parser.add_argument("--bundles", type=Path, default=Path("build/driver"))
    parser.add_argument("--checkpoint", type=Path, default=Path("/dev/shm/precast-checkpoint"))
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "gpu_serve.json")
    arguments = parser.parse_args()
    if arguments.build:
        arguments.build.mkdir(parents=True, exist_ok=True)
        build(arguments.build, SHAPE)
        return
    figures = measured(arguments.bundles / f"{SHAPE}.bundle", arguments.checkpoint)
    text = json.dumps({"claim": "gpu_serve", "machine": harness.machine_by_itself(), "figures": figures}, indent=1)
    arguments.out.write_text(text + "\n", encoding="utf-8")
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
