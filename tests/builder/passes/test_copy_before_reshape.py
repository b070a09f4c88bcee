"""Reshapes and products of what doesn't lie in their order: the copy stands in the graph."""

from __future__ import annotations

from graph_text import parse_graph

from precast.builder.passes.lower.copy_before_reshape import copy_before_reshape
from precast.ir.graph.schema import Graph
from precast.ir.graph.text import format_step
from precast.ir.verify.verifier import verify

GIVEN = """
symbols { T: 1..64 R: 0..64 }
inputs {
  %x: bfloat16[1, T, 16] %ids: int64[1, T] %rows: int64[R]
  %bx: bfloat16[1, 16, T] %bw: bfloat16[8, 16] %fx: float32[1, 16, T] %fw: float32[8, 16] %apart: bfloat16[1, 16, T, 2]
}
"""


def after(main: str, blocks: str = "") -> Graph:
    """The graph after the pass; the verifier finds no more in it than before."""
    before = parse_graph(f"{GIVEN} {blocks} main {{ {main} }}")
    made = copy_before_reshape.run(before)
    assert {each.rule for each in verify(made)} <= {each.rule for each in verify(before)}
    assert copy_before_reshape.run(made) == made
    return made


def test_what_is_no_view_is_copied() -> None:
    made = after(
        """%h = aten.reshape.default(self=%x, shape=[1, T, 2, 8])
        %t = aten.transpose.int(self=%h, dim0=1, dim1=2)
        %y = aten.reshape.default(self=%t, shape=[2, T, 2, 4])
        %z = aten.reshape.default(self=%t, shape=[(2 * T), 8])
        return out=%y, more=%z"""
    )

    assert [format_step(step) for step in made.main][2:] == [
        "%y: bfloat16[2, T, 2, 4] = aten.reshape.default@1(self=%t, shape=[2, T, 2, 4])",
        "%z_copied: bfloat16[1, 2, T, 8] = aten.cat.default@1(tensors=[%t], dim=0)",
        "%z: bfloat16[(2 * T), 8] = aten.reshape.default@1(self=%z_copied, shape=[(2 * T), 8])",
    ]


def test_what_is_a_view_stays() -> None:
    made = after(
        """%s: bfloat16[1, T, 4] = aten.slice.Tensor(self=%x, dim=2, start=0, end=4)
        %a = aten.reshape.default(self=%s, shape=[T, 2, 2])
        %n = aten.neg.default(self=%s)
        %b = aten.reshape.default(self=%n, shape=[(4 * T)])
        return out=%a, more=%b"""
    )

    assert [step.op for step in made.main] == [
        "aten.slice.Tensor", "aten.reshape.default", "aten.neg.default", "aten.reshape.default",
    ]  # fmt: skip


def test_a_block_copies_what_one_of_its_calls_gives_with_gaps() -> None:
    made = after(
        """%s: bfloat16[1, T, 4] = aten.slice.Tensor(self=%x, dim=2, start=0, end=4)
        %n = aten.neg.default(self=%s)
        %a: bfloat16[(4 * T)] = call flat(i=%n)
        %b: bfloat16[(4 * T)] = call flat(i=%s)
        return out=%a, more=%b""",
        """block flat { inputs { %i: bfloat16[1, T, 4] } params { } caches { }
          %f = aten.reshape.default(self=%i, shape=[(4 * T)])
          return %f }""",
    )

    assert [node.op for node in made.blocks[0].nodes] == ["aten.cat.default", "aten.reshape.default"]


def test_no_library_multiplies_columns_in_float32() -> None:
    made = after(
        """%t = aten.transpose.int(self=%fx, dim0=1, dim1=2)
        %y = aten.linear.default(input=%t, weight=%fw)
        return out=%y"""
    )

    assert [format_step(step) for step in made.main][1:] == [
        "%y_copied: float32[1, T, 16] = aten.cat.default@1(tensors=[%t], dim=0)",
        "%y: float32[1, T, 8] = aten.linear.default@1(input=%y_copied, weight=%fw)",
    ]


def test_nor_what_has_gaps_both_ways() -> None:
    made = after(
        """%s: bfloat16[1, 16, T, 1] = aten.slice.Tensor(self=%apart, dim=3, start=0, end=1)
        %q = aten.squeeze.dim(self=%s, dim=3)
        %t = aten.transpose.int(self=%q, dim0=1, dim1=2)
        %y = aten.linear.default(input=%t, weight=%bw)
        return out=%y"""
    )

    assert [step.op for step in made.main][2:] == ["aten.transpose.int", "aten.cat.default", "aten.linear.default"]


def test_rows_or_elements_that_lie_side_by_side_are_multiplied() -> None:
    made = after(
        """%t = aten.transpose.int(self=%bx, dim0=1, dim1=2)
        %a = aten.linear.default(input=%t, weight=%bw)
        %n = aten.transpose.int(self=%fx, dim0=1, dim1=2)
        %f = aten.neg.default(self=%n)
        %b = aten.linear.default(input=%f, weight=%fw)
        return out=%a, more=%b"""
    )

    assert "aten.cat.default" not in [step.op for step in made.main]
