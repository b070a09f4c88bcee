"""On a GPU: tiny models of several families, served by the driver alone, give the tokens that torch gives.

    python benchmarks/checks/check_driver.py --build DIR [FAMILY ...]      # without a GPU: bundles, native layers
    python benchmarks/checks/check_driver.py --bundles DIR [FAMILY ...]
    python benchmarks/checks/check_driver.py --bundles DIR --world tp=2 --world tp=2,ep=2 qwen3_moe    # two GPUs

Each family is served twice, by processes of their own: with torch, and without, where an import of torch or Triton
fails, in all ranks. The tokens of several ranks are compared with those of one rank, too: sums of half precision are
rounded elsewhere there, so a few answers may part. A family that fails doesn't end the others. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.no_torch import BLOCK
from support.published_bundles import write_checkpoint

from precast.ir.artifact import Bundle

_DENSE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
_WINDOWS = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _DENSE,
    "gemma3_text": {**_DENSE, **_WINDOWS, "query_pre_attn_scalar": 64},
    "qwen3_moe": {
        **_DENSE, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True,
    },
    "bamba": {
        **{name: value for name, value in _DENSE.items() if name != "head_dim"}, "attn_layer_indices": [1, 3],
        "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 32, "mamba_expand": 2,
    },
}  # fmt: skip
TARGET = "sm_90"
WORLDS: dict[str, tuple[str, ...]] = {"llama": ("tp=2",), "qwen3_moe": ("tp=2", "tp=2,ep=2")}
"""Of several ranks, beside one."""
PROMPTS = [[3, 5, 7], [11] * 40, list(range(20, 120)), [9], [400, 30, 20, 10, 5, 499]]
MAX_TOKENS = 40

SERVE = """
import json, sys, time
began = time.perf_counter()
backend, bundle, digest, checkpoint, capture, world = sys.argv[1:7]
world = json.loads(world)
import precast
from precast.loader.timeline import Timeline
SamplingParams = precast.SamplingParams
prompts, count = json.load(sys.stdin)
timeline = Timeline(origin=began)
engine = precast.load(
    bundle, weights=checkpoint, device="cuda", max_num_seqs=16, max_num_tokens=1024, cache_bytes=64 << 20,
    reuse_prefixes=False, allow_config_mismatch=True, capture=capture, backend=backend, native=digest,
    timeline=timeline, **world,
)
greedy = SamplingParams(max_tokens=count, ignore_eos=True)
drawn = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.8, top_k=20, top_p=0.9, seed=3)
first = engine.generate([prompts[0]], SamplingParams(max_tokens=1, ignore_eos=True))
seconds = time.perf_counter() - began
answers = [out.token_ids for params in (greedy, drawn) for out in engine.generate(prompts, params)]
stats = engine.stats
if world:
    began = time.perf_counter()
    engine.close()
    print("closed after %.2f s" % (time.perf_counter() - began), file=sys.stderr)
print(json.dumps({
    "answers": answers, "first_token_s": round(seconds, 3), "graphs": stats.graphs,
    "capture_s": round(stats.capture_seconds, 3), "captured_steps": stats.captured_steps,
    "eager_steps": stats.eager_steps, "compilations": stats.compilations,
    "imported": sorted({"torch", "triton", "transformers"} & set(sys.modules)), "timeline": timeline.text(),
}))
sys.stdout.flush()
import os; os._exit(0)
"""


def build(folder: Path, family: str) -> None:
    """The bundle, with its layer."""
    from transformers import AutoConfig

    import precast

    began = time.perf_counter()
    config = AutoConfig.for_model(family, **FAMILIES[family])
    worlds = [] if family not in WORLDS else ["tp=1", *WORLDS[family]]
    made = precast.build(config, folder / f"{family}.bundle", dtype="bfloat16", targets=[TARGET], worlds=worlds)
    layer = made.native[TARGET]
    size = sum(map(len, layer.images.values()))
    print(f"{family}: {len(layer.kernels)} kernels, {size >> 10} KiB, {time.perf_counter() - began:.0f} s", flush=True)


def served(
    backend: str, folder: Path, family: str, checkpoint: Path, capture: str, world: str = "tp=1"
) -> dict[str, Any]:
    """What a process that serves the family says; of several ranks, that of rank 0."""
    bundle = folder / f"{family}.bundle"
    ranks = {name: int(count) for name, count in (each.split("=") for each in world.split(","))}
    command = [sys.executable, "-c", SERVE, backend, bundle, Bundle.open(bundle).digest, checkpoint, capture]
    with tempfile.TemporaryDirectory() as place:
        environment = dict(os.environ)
        if backend == "driver":  # ranks that are started import it before all else
            (Path(place) / "sitecustomize.py").write_text(BLOCK, encoding="utf-8")
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (place, environment.get("PYTHONPATH"))))
        run = subprocess.run(
            [*map(str, command), json.dumps({} if world == "tp=1" else ranks)], input=json.dumps([PROMPTS, MAX_TOKENS]),
            text=True, capture_output=True, check=False, timeout=90, env=environment,
        )  # fmt: skip
    if run.returncode:
        raise RuntimeError(f"{backend}, {capture}: {run.stderr.strip()[-1500:]}")
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def check(folder: Path, family: str, place: Path, worlds: Sequence[str]) -> dict[str, Any]:
    """Both backends, with all steps captured and with none, in each of the worlds that the family is built for."""
    checkpoint = place / family
    bundle = str(folder / f"{family}.bundle")
    write_checkpoint(Path(bundle), checkpoint)
    found: dict[str, Any] = {}
    alone: dict[str, Any] = {}
    for world in (each for each in worlds if each == "tp=1" or each in WORLDS.get(family, ())):
        for capture in ("off", "before"):
            name = capture if world == "tp=1" else f"{world} {capture}"
            try:
                driver = served("driver", folder, family, checkpoint, capture, world)
                print(driver.pop("timeline"), flush=True)
                ours = driver.pop("answers")
                found[name] = {"driver": driver}
                if world != "tp=1":
                    alone = alone or served("driver", folder, family, checkpoint, "off")
                    found[name] |= {f"{key} as one rank": each for key, each in _same(ours, alone["answers"]).items()}
                torch = served("torch", folder, family, checkpoint, capture, world)
                torch.pop("timeline")
                found[name] |= _same(ours, torch.pop("answers")) | {"torch": torch}
            except (RuntimeError, subprocess.SubprocessError) as error:
                found[name] = found.get(name, {}) | {"failed": str(error)}
            print(family, name, json.dumps(found[name]), flush=True)
    return found


def _same(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> dict[str, Any]:
    """How many answers are equal, and how many tokens of each."""
    same = [sum(a == b for a, b in zip(one, other, strict=True)) for one, other in zip(ours, theirs, strict=True)]
    equal = sum(one == other for one, other in zip(ours, theirs, strict=True))
    return {"equal": f"{equal} of {len(ours)}", "same_tokens": same}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=Path)
    parser.add_argument("--bundles", type=Path)
    parser.add_argument("--checkpoints", type=Path, default=Path("/dev/shm/precast-driver"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--world", dest="worlds", action="append")
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    arguments = parser.parse_args()
    if arguments.build:
        arguments.build.mkdir(parents=True, exist_ok=True)
        for family in arguments.families:
            build(arguments.build, family)
        return
    found = {family: check(arguments.bundles, family, arguments.checkpoints, arguments.worlds or ["tp=1"])
             for family in arguments.families}  # fmt: skip
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1))
    print(
        json.dumps({family: {c: each.get("equal", "failed") for c, each in of.items()} for family, of in found.items()})
    )


if __name__ == "__main__":
    main()
