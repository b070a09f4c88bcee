"""How many launches a layer of a dense model is in a step on a GPU, by what computes its nodes."""

from __future__ import annotations

from pathlib import Path

import families
import pytest

from precast.builder.build import build
from precast.ir.graph.schema import Block, Graph, Node
from precast.ir.graph.world import unsharded
from precast.kernels.choices import resolve
from precast.kernels.use import GPU, statics_in, types_in, use_of

VIEWS = {"aten.reshape.default", "aten.slice.Tensor"}
BEFORE_GATE = ["rms", "linear", "rotary_write_kv", "paged_attention", "linear", "rms"]
"""A dense layer up to its gate: the norms with the sums beside them, of which the next layer has its last."""
LAYERS = {1: [*BEFORE_GATE, "gated_linear", "linear"], 9: [*BEFORE_GATE, "linear", "gated_activation", "linear"]}
"""By the tokens of a step: the weight stream gates what it multiplied."""
OF_MORE_ROWS = ["linear", "gated_activation"]
"""What a gated linear layer of more rows launches: by its record, or by the function that takes a part at a time."""


def launches(block: Block | Graph, num_tokens: int) -> list[str]:
    """What each launch of the function is of; one of a node that PyTorch computes in several fails."""
    types, found = types_in(block), list[str]()
    for node in block.nodes if isinstance(block, Block) else block.main:
        if not isinstance(node, Node) or node.op in VIEWS:
            continue
        use = use_of(node, types, GPU, statics_in(block))
        record = resolve(use, {"T": num_tokens}).record
        name = node.op.removeprefix("precast.").removeprefix("aten.").removesuffix(".default")
        if record.name in ("triton.gated_linear", "cublaslt.gated_linear"):
            found += OF_MORE_ROWS
            continue
        is_one = isinstance(record.runs, str) and (record.kind != "torch" or node.op == "aten.linear.default")
        assert is_one or not isinstance(record.runs, str), f"{node.op} is many operations: {record.name}"
        # Attention has one to three, by the sizes of the step.
        count = 1 if isinstance(record.runs, str) or name == "paged_attention" else len(record.runs(use))
        found += ["rms" if "rms" in name or "norm" in name else name] * count
    return found


@pytest.mark.parametrize("variant", ["llama", "qwen3", "gemma3", "phi3"])
def test_a_dense_layer_is_seven_launches_and_attention(variant: str, tmp_path: Path) -> None:
    """Four products, and one launch for all that is between two of these or beside attention; eight for 9 tokens."""
    config = families.make_config(variant)
    config.hidden_size = 64  # of which the weight stream takes all
    bundle = build(config, tmp_path / "bundle", dtype="bfloat16")

    graph = unsharded(bundle.graph)
    assert graph.blocks
    for block in graph.blocks:
        assert {tokens: launches(block, tokens) for tokens in LAYERS} == LAYERS
