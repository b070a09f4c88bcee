"""How many launches a layer of a dense model is in a step on a GPU, by what computes its nodes."""

from __future__ import annotations

from pathlib import Path

import families
import pytest

from precast.builder.build import build
from precast.ir.graph.schema import Block, Graph, Node
from precast.kernels.choices import resolve
from precast.kernels.use import GPU, types_in, use_of

VIEWS = {"aten.reshape.default", "aten.slice.Tensor"}
LAYER = ["rms", "linear", "rotary_write_kv", "paged_attention", "linear", "rms", "linear", "gated_activation", "linear"]
"""A dense layer: the norms with the sums beside them, of which the next layer has its last."""


def launches(block: Block | Graph) -> list[str]:
    """What each launch of the function is of; one of a node that PyTorch computes in several fails."""
    types, found = types_in(block), list[str]()
    for node in block.nodes if isinstance(block, Block) else block.main:
        if not isinstance(node, Node) or node.op in VIEWS:
            continue
        use = use_of(node, types, GPU)
        record = resolve(use).record
        name = node.op.removeprefix("precast.").removeprefix("aten.").removesuffix(".default")
        is_one = isinstance(record.runs, str) and (record.kind != "torch" or node.op == "aten.linear.default")
        assert is_one or not isinstance(record.runs, str), f"{node.op} is many operations: {record.name}"
        # Attention has one to three, by the sizes of the step.
        count = 1 if isinstance(record.runs, str) or name == "paged_attention" else len(record.runs(use))
        found += ["rms" if "rms" in name or "norm" in name else name] * count
    return found


@pytest.mark.parametrize("variant", ["llama", "qwen3", "gemma3", "phi3"])
def test_a_dense_layer_is_eight_launches_and_attention(variant: str, tmp_path: Path) -> None:
    """Four products, and one launch for all that stands between two of these or beside attention."""
    bundle = build(families.make_config(variant), tmp_path / "bundle", dtype="bfloat16")

    assert bundle.graph.blocks
    for block in bundle.graph.blocks:
        assert launches(block) == LAYER
