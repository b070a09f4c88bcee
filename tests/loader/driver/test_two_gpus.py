"""Two ranks on a GPU each, without torch and Triton: the tokens of two ranks with torch, and nearly those of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.no_torch import BLOCK

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
]  # fmt: skip

_DENSE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
CASES = [
    ("llama", _DENSE, {"tp": 2}, "off"),
    ("llama", _DENSE, {"tp": 2}, "before"),
    (
        "qwen3_moe",
        {**_DENSE, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
        {"tp": 2, "ep": 2}, "before",
    ),
]  # fmt: skip
SERVE = """
import json, sys
import precast
bundle, weights, digest, options = sys.argv[1:]
engine = precast.load(
    bundle, weights=weights, native=digest, device="cuda", max_num_seqs=8, max_num_tokens=256, cache_bytes=16 << 20,
    **json.loads(options),
)
prompts, found = [[3, 5, 7], [11] * 40, list(range(20, 90)), [9]], []
drawn_so = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 3}, {"temperature": 1.0, "top_p": 0.8, "seed": 4}
for drawn in ({}, *drawn_so):
    params = precast.SamplingParams(max_tokens=24, ignore_eos=True, **drawn)
    found += [output.token_ids for output in engine.generate(prompts, params)]
stats = engine.stats
engine.close()
print(json.dumps([found, stats.captured_steps, stats.compilations, "torch" in sys.modules]))
"""


def served(folder: Path, digest: str, **options: Any) -> Any:
    """Answers, captured steps, kernels that were compiled, and whether torch was imported, of a process that serves."""
    environment = dict(os.environ)
    if options["backend"] == "driver":  # the rank that is started imports it before all else, too
        (folder / "modules").mkdir(exist_ok=True)
        (folder / "modules" / "sitecustomize.py").write_text(BLOCK, encoding="utf-8")
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(folder / "modules"), os.environ.get("PYTHONPATH")))
        )
    run = subprocess.run(
        [sys.executable, "-c", SERVE, str(folder / "bundle"), str(folder / "weights"), digest, json.dumps(options)],
        capture_output=True, text=True, check=False, timeout=300, env=environment,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize(("family", "config", "world", "capture"), CASES, ids=lambda value: str(value)[:20])
def test_two_gpus_serve_without_torch(
    family: str, config: dict[str, Any], world: dict[str, int], capture: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", minversion="5.17")
    from transformers import AutoConfig, AutoModelForCausalLM

    from precast.builder.build import build

    made = AutoConfig.for_model(family, **config)
    names = ["tp=1", ",".join(f"{name}={count}" for name, count in world.items())]
    digest = build(made, tmp_path / "bundle", dtype="bfloat16", targets=["sm_90"], worlds=names).digest
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(made).bfloat16().save_pretrained(tmp_path / "weights")

    ours, captured_steps, compilations, has_torch = served(tmp_path, digest, backend="driver", capture=capture, **world)
    theirs, _, their_compilations, _ = served(tmp_path, digest, backend="torch", capture=capture, **world)
    alone, *_ = served(tmp_path, digest, backend="driver", capture=capture)

    assert not has_torch
    assert ours == theirs
    assert (compilations, their_compilations) == (0, 0)
    assert (captured_steps > 0) == (capture == "before")
    same = sum(a == b for one, other in zip(ours, alone, strict=True) for a, b in zip(one, other, strict=True))
    assert same > 0.5 * sum(map(len, alone)), "sums of bfloat16 are rounded elsewhere, no more"
