"""Claim: a load with a native layer compiles nothing, draws the tokens of one without, and captures sooner.

    PYTHONPATH=benchmarks python benchmarks/bench_gpu_native.py FOLDER

FOLDER has bundles with a layer for this machine's GPU, compiled elsewhere and with any version of Triton. Of each,
weights are random. Two fresh processes load it, with the layer and without, and Triton's cache empty: what they
compiled, the seconds of a load whose steps are captured before the first request, and the tokens of prompts in steps of
many sizes. A bundle that fails is noted, and the others are measured.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from support import harness, random_checkpoints

from precast.ir.artifact import Bundle

RUN = """
import json, os, sys, time
bundle, weights, native, cache = sys.argv[1:]
os.environ["TRITON_CACHE_DIR"] = os.environ["XDG_DATA_HOME"] = cache
import precast
from precast.loader.timeline import Timeline
timeline = Timeline()
started = time.perf_counter()
allowed = [precast.Bundle.open(bundle).digest] if native == "yes" else []
engine = precast.load(bundle, weights=weights, device="cuda", max_num_seqs=64, max_num_tokens=1024, capture="before",
                      cache_bytes=1 << 30, native=allowed, timeline=timeline)
loaded = time.perf_counter() - started
prompts = [[3 + (7 * i + n) % 97 for i in range(n)] for n in (1, 2, 3, 5, 8, 9, 17, 40, 64, 65, 100, 130, 220)]
greedy = precast.SamplingParams(max_tokens=8, ignore_eos=True)
drawn = precast.SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.7, top_k=20, top_p=0.9, seed=5)
tokens = [out.token_ids for params in (greedy, drawn) for out in engine.generate(prompts, params)]
stats = engine.stats
notes = [phase.note for phase in timeline.phases if getattr(phase, "note", "")]
print(json.dumps({"compilations": stats.compilations, "load_seconds": round(loaded, 3), "graphs": stats.graphs,
                  "capture_seconds": round(stats.capture_seconds, 3), "eager_steps": stats.eager_steps, "notes": notes,
                  "tokens": tokens}))
"""


def measure(path: Path, folder: Path) -> dict[str, Any]:
    """One bundle, with its layer and without."""
    bundle = Bundle.open(path)
    weights = folder / f"{path.name}.weights"
    random_checkpoints.write(bundle, weights)
    found = {}
    for native in ("yes", "no"):
        cache = folder / f"{path.name}.{native}"
        cache.mkdir()
        found[native] = harness.fresh_process(RUN, str(path), str(weights), native, str(cache))
    tokens = [each.pop("tokens") for each in found.values()]
    pairs = list(zip(*tokens, strict=True))
    return {
        "layer_compilers": {target: layer.compilers for target, layer in bundle.native.items()},
        "with_layer": found["yes"],
        "without": found["no"],
        "equal_answers": sum(one == other for one, other in pairs),
        "answers": len(pairs),
        "passes": found["yes"]["compilations"] == 0 < found["no"]["compilations"] and tokens[0] == tokens[1],
    }


def main() -> None:
    """Writes `results/gpu_native.json`, and says in its last line whether all went well."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for path in sorted(Path(sys.argv[1]).glob("*.bundle")):
            try:
                figures[path.stem] = measure(path, Path(folder))
            except subprocess.CalledProcessError as error:
                figures[path.stem] = {"passes": False, "error": error.stderr[-1500:]}
            except Exception as error:  # noqa: BLE001 - whatever one bundle meets, the others are measured
                figures[path.stem] = {"passes": False, "error": repr(error)[-1500:]}
    harness.write(harness.RESULTS / "gpu_native.json", "gpu_native", figures)
    print("native: " + ", ".join(f"{name} {'ok' if each['passes'] else 'FAILS'}" for name, each in figures.items()))


if __name__ == "__main__":
    main()
