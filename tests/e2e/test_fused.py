"""Fused ops change nothing: logits and tokens of whole models are the same to the last bit without them, on a CPU."""

from __future__ import annotations

from pathlib import Path

import families
import pytest
import torch

import precast
from precast.check.agreement import NUM_TOKENS, PROMPTS, arrive_one_after_another

# Norms without an op, soft caps, sums of branches; decays and gates; a router.
VARIANTS = ("gemma3n", "gemma4", "qwen3_next", "phimoe")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_fused_ops_change_no_bit(variant: str, dtype: str, tmp_path: Path) -> None:
    families.make_model(variant).save_pretrained(tmp_path / "ckpt")

    fused = precast.build(tmp_path / "ckpt", tmp_path / "fused", dtype=dtype, snapshots=tmp_path / "snapshots")
    plain = precast.build(
        tmp_path / "ckpt", tmp_path / "plain", dtype=dtype, snapshots=tmp_path / "snapshots",
        disabled_passes=("fuse_pointwise",),
    )  # fmt: skip

    assert "precast.fused" in fused.manifest.ops
    assert "precast.fused" not in plain.manifest.ops
    logits, answers = answers_of(tmp_path / "fused", tmp_path / "ckpt")
    plain_logits, plain_answers = answers_of(tmp_path / "plain", tmp_path / "ckpt")
    assert answers == plain_answers
    assert all(map(torch.equal, logits, plain_logits))


def answers_of(bundle: Path, weights: Path) -> tuple[list[torch.Tensor], list[list[int]]]:
    """The logits of prompts that are computed in chunks, and their answers while they arrive one after another."""
    with precast.load(
        bundle, weights=weights, device="cpu", max_num_seqs=3, max_num_tokens=7, cache_bytes=1 << 22
    ) as engine:
        logits = [torch.as_tensor(engine.logits(list(prompt))) for prompt in PROMPTS]
        return logits, arrive_one_after_another(engine, PROMPTS, NUM_TOKENS)
