"""The shard pass on small graphs: what is split and where it is summed, and what is left whole, with the reason."""

from __future__ import annotations

import pytest
from graph_text import parse_graph

from precast.builder.passes.shard.shard import shard
from precast.ir.graph.schema import Graph, ShardRow
from precast.ir.graph.text import format_step, format_value
from precast.ir.graph.world import unsharded
from precast.ir.verify.verifier import verify

FEED_FORWARD = """
symbols { T: 1.. }
inputs { %x: float32[1, T, 16] }
params {
  %up: float32[24, 16] = read("up", [24, 16], float32)
  %down: float32[16, 12] = read("down", [16, 12], float32)
  %bias: float32[16] = read("bias", [16], float32)
}
main {
  %h = aten.linear.default(input=%x, weight=%up)
  %g = precast.gated_activation(x=%h, kind="silu")
  %y = aten.linear.default(input=%g, weight=%down, bias=%bias)
  %z = aten.add.Tensor(self=%y, other=%x)
  return hidden=%z
}
"""


def graph_of(source: str, *edits: tuple[str, str]) -> Graph:
    for old, new in edits:
        assert old in source, f"{old!r} is not in the graph"
        source = source.replace(old, new)
    return parse_graph(source)


def steps(graph: Graph) -> list[str]:
    return [format_step(step) for step in graph.main]


def reasons(graph: Graph) -> dict[tuple[str, ...], str]:
    return {row.params: row.reason for row in graph.shards.rows if row.mode == "replicated"}


def test_a_feed_forward_layer_is_split_by_channels_and_summed_once() -> None:
    graph = shard(graph_of(FEED_FORWARD))

    assert steps(graph) == [
        "%h: float32[1, T, (2 * ceildiv(12, tp))] = aten.linear.default@1(input=%x, weight=%up)",
        '%g: float32[1, T, ceildiv(12, tp)] = precast.gated_activation@1(x=%h, kind="silu")',
        "%y_bias: float32[16] = aten.mul.Tensor@1(self=%bias, other=(1 + (-1 * min(1, rank))))",
        "%y: float32[1, T, 16] = aten.linear.default@1(input=%g, weight=%down, bias=%y_bias)",
        '%y_sum: float32[1, T, 16] = precast.all_reduce@1(x=%y, group="tp")',
        "%z: float32[1, T, 16] = aten.add.Tensor@1(self=%y_sum, other=%x)",
    ]
    assert [format_value(param) for param in graph.params] == [  # type: ignore[arg-type]
        "%up: float32[(2 * ceildiv(12, tp)), 16]", "%down: float32[16, ceildiv(12, tp)]", "%bias: float32[16]",
    ]  # fmt: skip
    assert [world.tp for world in graph.shards.worlds] == [1, 2, 3, 4, 6, 12]
    assert graph.shards.rows == (
        ShardRow("feed-forward", "", "column", ("up",), (), 12),
        ShardRow("feed-forward", "", "row", ("down",), ("y",), 12, "all_reduce", "tp"),
    )
    assert verify(graph) == ()


def test_on_one_rank_it_is_the_graph_that_went_in() -> None:
    graph = graph_of(FEED_FORWARD)

    assert unsharded(shard(graph)) == graph


def test_branches_that_are_added_are_summed_once_where_nothing_could_be_fused_behind() -> None:
    second = (
        "%h2 = aten.linear.default(input=%x, weight=%up2) %g2 = aten.silu.default(self=%h2)"
        " %y2 = aten.linear.default(input=%g2, weight=%down2) %half = aten.mul.Tensor(self=%y2, other=0.5)"
        " %z = aten.add.Tensor(self=%y, other=%half)"
    )
    up, down = (
        '%up2: float32[8, 16] = read("a", [8, 16], float32)',
        '%down2: float32[16, 8] = read("b", [16, 8], float32)',
    )
    edits = ("%z = aten.add.Tensor(self=%y, other=%x)", second), ("params {", f"params {{ {up} {down}")
    behind = ("return hidden=%z", "%w = aten.silu.default(self=%z) return hidden=%w")

    once = shard(graph_of(FEED_FORWARD, *edits))
    twice = shard(graph_of(FEED_FORWARD, *edits, behind))

    assert [step for step in steps(once) if "all_reduce" in step] == [
        '%z_sum: float32[1, T, 16] = precast.all_reduce@1(x=%z, group="tp")'
    ]
    assert [step.split(":")[0] for step in steps(twice) if "all_reduce" in step] == ["%y_sum", "%y2_sum"]
    assert verify(once) == verify(twice) == ()


def test_an_output_in_parts_is_gathered_at_the_end() -> None:
    graph = shard(graph_of(FEED_FORWARD, ("return hidden=%z", "return hidden=%z, inner=%g")))

    assert steps(graph)[-2:] == [
        '%g_gathered: float32[1, T, (ceildiv(12, tp) * tp)] = precast.all_gather@1(x=%g, dim=2, group="tp", size=tp)',
        "%g_whole: float32[1, T, 12] = aten.slice.Tensor@1(self=%g_gathered, dim=2, start=0, end=12)",
    ]
    assert graph.outputs == {"hidden": "z", "inner": "g_whole"}
    assert verify(graph) == ()


@pytest.mark.parametrize(
    ("edits", "params", "reason"),
    [
        ((("12]", "11]"), ("[24,", "[22,")), ("up", "down"), "11 can't be divided by 2"),
        (
            (("(input=%g", "(input=%s"), ("%y =", "%s = aten.softmax.int(self=%g, dim=-1) %y =")),
            ("up", "down"),
            "aten.softmax.int needs all",
        ),
        (
            (
                ("x=%h", "x=%t"),
                ("%g =", "%t = aten.mul.Tensor(self=%h, other=%wide) %g ="),
                ("inputs {", "inputs { %wide: float32[1, T, 24]"),
            ),
            ("up", "down"),
            "comes from outside of the layer",
        ),
    ],
)
def test_what_cannot_be_split_is_whole_and_says_why(
    edits: tuple[tuple[str, str], ...], params: tuple[str, ...], reason: str
) -> None:
    before = graph_of(FEED_FORWARD, *edits)

    graph = shard(before)

    assert graph.main == before.main
    assert graph.params == before.params
    assert [world.tp for world in graph.shards.worlds] == [1]
    assert any(reason in found for names, found in reasons(graph).items() if set(names) & set(params)), reasons(graph)


OVER_ENTRIES = """
symbols { T: 1.. B: 1.. P: 1.. N: 1.. }
inputs {
  %x: float32[1, T, 16] %cache: float32[P, 4, 4] %lens: int32[B] %cu: int32[(B + 1)] %indices: int32[N]
  %indptr: int32[(B + 1)] %start: int32[B]
}
params {
  %q_b: float32[32, 16] = read("q_b", [32, 16], float32)
  %sinks: float32[8] = read("sinks", [8], float32)
  %o_a: float32[2, 16, 5] = read("o_a", [2, 16, 5], float32)
  %o_b: float32[16, 10] = read("o_b", [16, 10], float32)
}
main {
  %h = aten.linear.default(input=%x, weight=%q_b)
  %q = aten.reshape.default(self=%h, shape=[1, T, 8, 4])
  %a, %lse = precast.paged_entry_attention(q=%q, cache=%cache, selected=none, cu_seqlens=%cu, kv_lens=%lens,
    page_indices=%indices, page_indptr=%indptr, page_start=%start, scale=0.5, rate=4)
  %s = aten.sub.Tensor(self=%lse, other=%sinks)
  %w = aten.sigmoid.default(self=%s)
  %u = aten.unsqueeze.default(self=%w, dim=3)
  %y = aten.mul.Tensor(self=%a, other=%u)
  %g = aten.reshape.default(self=%y, shape=[T, 2, 16])
  %t = aten.transpose.int(self=%g, dim0=0, dim1=1)
  %m = aten.matmul.default(self=%t, other=%o_a)
  %n = aten.transpose.int(self=%m, dim0=0, dim1=1)
  %r = aten.reshape.default(self=%n, shape=[1, T, 10])
  %o = aten.linear.default(input=%r, weight=%o_b)
  return hidden=%o
}
"""
"""8 heads of 4 elements over entries of 4 tokens; results of 4 heads are projected together."""
CACHE_IS_AN_INPUT = "IR047"


def test_heads_over_entries_are_split_by_groups_that_are_projected_together() -> None:
    graph = shard(graph_of(OVER_ENTRIES))

    assert [world.tp for world in graph.shards.worlds] == [1, 2]
    assert [format_value(param) for param in graph.params] == [  # type: ignore[arg-type]
        "%q_b: float32[(16 * ceildiv(2, tp)), 16]", "%sinks: float32[(4 * ceildiv(2, tp))]",
        "%o_a: float32[ceildiv(2, tp), 16, 5]", "%o_b: float32[16, (5 * ceildiv(2, tp))]",
    ]  # fmt: skip
    assert [step.split(" =")[0] for step in steps(graph) if "entry_attention" in step or "all_reduce" in step] == [
        "%a: float32[1, T, (4 * ceildiv(2, tp)), 4], %lse: float32[1, T, (4 * ceildiv(2, tp))]",
        "%o_sum: float32[1, T, 16]",
    ]
    assert graph.shards.rows == (
        ShardRow("entry attention", "", "column", ("q_b", "sinks", "o_a"), (), 2),
        ShardRow("entry attention", "", "row", ("o_b",), ("o",), 2, "all_reduce", "tp"),
    )
    assert {violation.rule for violation in verify(graph)} == {CACHE_IS_AN_INPUT}


def test_heads_over_entries_are_split_one_by_one_where_one_matrix_projects_all() -> None:
    grouped = OVER_ENTRIES[OVER_ENTRIES.index("  %g =") : OVER_ENTRIES.index("  %o =")]
    graph = shard(
        graph_of(
            OVER_ENTRIES,
            (grouped, "  %r = aten.reshape.default(self=%y, shape=[1, T, 32])\n"),
            (
                '%o_b: float32[16, 10] = read("o_b", [16, 10], float32)',
                '%o_b: float32[16, 32] = read("o_b", [16, 32], float32)',
            ),
            ('  %o_a: float32[2, 16, 5] = read("o_a", [2, 16, 5], float32)\n', ""),
        )
    )

    assert [world.tp for world in graph.shards.worlds] == [1, 2, 4, 8]
    assert {row.units for row in graph.shards.rows} == {8}
    assert {violation.rule for violation in verify(graph)} == {CACHE_IS_AN_INPUT}
