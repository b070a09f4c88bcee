"""Each family becomes, on one rank, `precast` ops and a few plain ones, and is the same when it is rebuilt from a
snapshot."""

from __future__ import annotations

from pathlib import Path

import families
import pytest

from precast.builder.build import build
from precast.ir.artifact import ops_of
from precast.ir.graph.schema import Call
from precast.ir.graph.world import unsharded

# What stays beside our own ops: products, views, sums of parallel branches, scales and soft caps, and what latent
# attention's rotated part of a head is put together with.
PLAIN = {
    "aten.linear.default", "aten.reshape.default", "aten.slice.Tensor", "aten.add.Tensor", "aten.mul.Tensor",
    "aten.div.Tensor", "aten.tanh.default", "aten.gelu.default", "aten.cat.default", "aten.transpose.int",
}  # fmt: skip

# What the families of other layers keep beside those: the decay and the gates of states, gates of shared experts and
# gated norms, which are steps of fused ops, norms without a weight, routers and rotations of a form of their own.
STATES = {"aten.exp.default", "aten.neg.default", "aten.silu.default", "aten.to.dtype"}
DELTA = STATES | {
    "aten.sigmoid.default", "aten.softplus.default", "aten.mean.dim", "aten.pow.Tensor_Scalar", "aten.rsqrt.default",
}  # fmt: skip
SHARED_GATE = {"aten.sigmoid.default", "aten.sum.dim_IntList", "aten.to.dtype"}
TABLES = {"aten.cos.default", "aten.sin.default", "aten.unsqueeze.default", "aten.to.dtype"}
NORM = {"aten.mean.dim", "aten.pow.Tensor_Scalar", "aten.to.dtype"}
TURNED_PAIRS = {"aten.expand.default", "aten.neg.default", "aten.unsqueeze.default"}
BESIDE = {
    "dbrx": {"aten.abs.default", "aten.clamp.default", "aten.sum.dim_IntList", "aten.to.dtype"},
    "deepseek_v32": {"aten.squeeze.dim", "aten.to.dtype", "aten.unsqueeze.default"},
    # hyper-connections, whose weights are a few iterations of their own; rotated pairs; a table of experts by token
    "deepseek_v4": TABLES | TURNED_PAIRS | NORM | {"aten.rsqrt.default"} | {
        "aten.clamp.default", "aten.gather.default", "aten.matmul.default", "aten.select.int", "aten.sigmoid.default",
        "aten.silu.default", "aten.softmax.int", "aten.softplus.default", "aten.sqrt.default", "aten.sub.Tensor",
        "aten.sum.dim_IntList",
    },
    "falcon_h1": STATES,
    "gemma3n_text": NORM | {
        "aten.clamp.default", "aten.expand.default", "aten.ge.Scalar", "aten.logical_not.default", "aten.lt.Scalar",
        "aten.masked_fill.Scalar", "aten.matmul.default", "aten.minimum.default", "aten.permute.default",
        "aten.relu.default", "aten.select.int", "aten.sqrt.default", "aten.squeeze.dim", "aten.sub.Tensor",
        "aten.sum.dim_IntList", "aten.unsqueeze.default",
    },
    "gemma4_text": NORM | {"aten.select.int"},
    "glm": TURNED_PAIRS,
    "glm4": TURNED_PAIRS,
    "glm4_moe": {"aten.to.dtype"},
    "glm4_moe_lite": {"aten.to.dtype"},
    "glm_moe_dsa": {"aten.squeeze.dim", "aten.to.dtype", "aten.unsqueeze.default"},
    "gpt_oss": TABLES,
    "granitemoehybrid": STATES,
    # each choice of a token is a row for an expert of its own, and a token's rows are added
    "jetmoe": {"aten.expand.default", "aten.sum.dim_IntList", "aten.to.dtype", "aten.unsqueeze.default"},
    "jamba": STATES | {"aten.matmul.default"},
    "lfm2_moe": {"aten.sum.dim_IntList"},
    "llama4_text": {
        "aten.floor.default", "aten.full_like.default", "aten.log1p.default", "aten.select.int",
        "aten.sum.dim_IntList", "aten.to.dtype", "aten.unsqueeze.default",
    },
    "longcat_flash": {"aten.lt.Scalar", "aten.masked_fill.Scalar", "aten.sum.dim_IntList", "aten.to.dtype"},
    "minimax_m3_vl_text": {"aten.clamp.default", "aten.sigmoid.default"},
    "mamba": STATES | {"aten.matmul.default"},
    "mamba2": STATES,
    "minimax": {"aten.neg.default", "aten.sigmoid.default", "aten.silu.default"},
    "nemotron_h": STATES | {"aten.relu.default"},
    "olmo": {"aten.to.dtype"},
    "phimoe": {
        "aten.abs.default", "aten.gather.default", "aten.gt.Scalar", "aten.masked_fill.Scalar", "aten.max.dim",
        "aten.maximum.default", "aten.scatter.value", "aten.softmax.int", "aten.sub.Tensor",
    },
    "qwen2_moe": SHARED_GATE,
    "qwen3_5_text": DELTA | TABLES | {"aten.expand.default", "aten.select.int"},
    "qwen3_5_moe_text": DELTA | SHARED_GATE | TABLES | {"aten.expand.default", "aten.select.int"},
    "qwen3_next": DELTA | SHARED_GATE,
}  # fmt: skip
MANY_BLOCKS = {
    # calls of blocks, blocks
    "gemma3n_text": (8, 5), "gemma4_text": (4, 4), "longcat_flash": (2, 2), "nemotron_h": (4, 4),
}  # fmt: skip

FIRST_OF_FAMILY = {model_type: name for name, (model_type, _) in reversed(families.VARIANTS.items())}


DENSE = {
    "cohere2", "gemma", "gemma2", "gemma3_text", "glm4_moe_lite", "gpt2", "gpt_neox", "granite", "llama", "minicpm3",
    "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3", "starcoder2", "youtu",
}  # fmt: skip
"""Families of attention and one kind of feed-forward layer: nothing else is left of them."""


@pytest.mark.parametrize("variant", sorted(FIRST_OF_FAMILY.values()))
def test_a_family_in_bfloat16(variant: str, tmp_path: Path) -> None:
    config = families.make_config(variant)

    first = build(config, tmp_path / "first", dtype="bfloat16", snapshots=tmp_path / "snapshots")
    again = build(config, tmp_path / "again", dtype="bfloat16", snapshots=tmp_path / "snapshots")

    left = {op for op in ops_of(unsharded(first.graph)) if op.startswith("aten.")}
    assert left <= PLAIN | BESIDE.get(config.model_type, set())
    calls, blocks = MANY_BLOCKS.get(config.model_type, (config.num_hidden_layers, 3))
    assert len(first.graph.blocks) <= blocks
    assert sum(isinstance(step, Call) for step in first.graph.main) == calls
    assert again.provenance["from_snapshot"] is True
    assert again.digest == first.digest
