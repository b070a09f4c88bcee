"""A shard plan beside that of transformers: what is the same, what differs, and why."""

from __future__ import annotations

from pathlib import Path

import families
import pytest
from graph_text import parse_graph

import precast
from precast.builder.passes.shard.shard import shard
from precast.builder.shard.compared import Comparison, Difference, compared
from precast.builder.source.tp_plan import tp_plan
from precast.ir.graph.schema import Graph

FEED_FORWARD = """
symbols { T: 1.. }
inputs { %x: float32[1, T, 16] }
params {
  %model.layers.0.mlp.gate_proj_up_proj.weight: float32[24, 16] = concat([read("model.layers.0.mlp.gate_proj.weight", [12, 16], float32), read("model.layers.0.mlp.up_proj.weight", [12, 16], float32)], dim=0)
  %model.layers.0.mlp.down_proj.weight: float32[16, 12] = read("model.layers.0.mlp.down_proj.weight", [16, 12], float32)
  %model.layers.0.mlp.down_proj.bias: float32[16] = read("model.layers.0.mlp.down_proj.bias", [16], float32)
  %model.layers.0.router.weight: float32[4, 16] = read("model.layers.0.router.weight", [4, 16], float32)
}
main {
  %h = aten.linear.default(input=%x, weight=%model.layers.0.mlp.gate_proj_up_proj.weight)
  %g = precast.gated_activation(x=%h, kind="silu")
  %y = aten.linear.default(input=%g, weight=%model.layers.0.mlp.down_proj.weight, bias=%model.layers.0.mlp.down_proj.bias)
  %z = aten.add.Tensor(self=%y, other=%x)
  %r = aten.linear.default(input=%x, weight=%model.layers.0.router.weight)
  return hidden=%z, chosen=%r
}
"""  # noqa: E501

THEIRS = {
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
    "layers.*.router": "replicate",
}


@pytest.fixture
def split() -> Graph:
    """A feed-forward layer over ranks, and a router that is whole."""
    return shard(parse_graph(FEED_FORWARD))


def test_parts_of_a_joint_projection_and_a_bias_that_is_whole_are_the_same(split: Graph) -> None:
    assert compared(split, THEIRS) == Comparison(4, 4, ())


def test_entries_that_split_otherwise_are_told_with_our_reason(split: Graph) -> None:
    found = compared(split, THEIRS | {"layers.*.router": "colwise", "layers.*.mlp.up_proj": "rowwise"})

    assert found.differences == (
        Difference("layers.*.mlp.up_proj", "rowwise", "column", 1, "feed-forward, by 12"),
        Difference("layers.*.router", "colwise", "replicated", 1, "no layer that is split has it"),
    )
    assert (found.entries, found.same) == (4, 2)


def test_what_only_we_split_is_told_by_its_name_without_numbers(split: Graph) -> None:
    found = compared(split, {"layers.*.mlp.gate_proj": "colwise"})

    expected = Difference("model.layers.*.mlp.down_proj.weight", "", "row", 1, "feed-forward, by 12")
    assert found == Comparison(1, 1, (expected,))


@pytest.mark.parametrize(
    "entry",
    [
        ("layers.*.attn.q_proj", "colwise"),  # no such param
        ("layers.*.mlp.gate", "colwise"),  # the beginning of a name's part
        ("layers.mlp.gate_proj", "rowwise"),
        ("layers.*.mlp", "moe_tp_experts"),  # says what a module sends
    ],
)
def test_entries_that_say_nothing_of_a_param_are_left_out(split: Graph, entry: tuple[str, str]) -> None:
    assert compared(split, THEIRS | dict([entry])) == Comparison(4, 4, ())


def test_the_plan_of_transformers_has_the_head_of_the_class() -> None:
    found = tp_plan(families.make_config("llama-tied-bias"))

    assert found["layers.*.mlp.down_proj"] == "rowwise"
    assert found["lm_head"] == "colwise_gather_output"


def test_a_build_keeps_the_comparison_outside_of_the_identity(tmp_path: Path) -> None:
    bundle = precast.build(families.make_config("llama-tied-bias"), tmp_path / "b", dtype="float32")

    found = bundle.provenance["tp_plan"]
    assert found["entries"] == found["same"] == 7
    assert [(each["entry"], each["ours"]) for each in found["differences"]] == [("model.embed_tokens.weight", "vocab")]
