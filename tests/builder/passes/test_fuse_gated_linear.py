"""A product and the gate over it become one op: graphs in, graphs out, and what must stay as it is."""

from __future__ import annotations

import pytest
from graph_text import parse_graph

from precast.builder.passes.lower.fuse_gated_linear import fuse_gated_linear
from precast.ir.graph.schema import Graph, Node
from precast.ir.graph.text import format_step
from precast.ir.verify.verifier import verify

GIVEN = """
symbols { T: 1..64 tp: 1..2 }
inputs { %x: bfloat16[1, T, 16] %wide: bfloat16[1, T, 12] }
params {
  %w: bfloat16[12, 16] = read("w", [12, 16], bfloat16)
  %b: bfloat16[12] = read("b", [12], bfloat16)
  %v: bfloat16[16, 6] = read("v", [16, 6], bfloat16)
  %s: bfloat16[(2 * floordiv(6, tp)), 16] = concat([
    slice(read("g", [6, 16], bfloat16), dim=0, start=0, length=floordiv(6, tp)),
    slice(read("u", [6, 16], bfloat16), dim=0, start=0, length=floordiv(6, tp))
  ], dim=0)
}
"""
PRODUCT = "%p = aten.linear.default(input=%x, weight=%w)"
GATE = '%g = precast.gated_activation(x=%p, kind="silu")'
GATED = '%g: bfloat16[1, T, 6] = precast.gated_linear@1(input=%x, weight=%w, kind="silu")'


def graph(nodes: str, *outputs: str) -> Graph:
    """A graph of these nodes, over x [1, T, 16] and wide [1, T, 12], the weights w [12, 16] and v [16, 6], b [12]."""
    returned = ", ".join(f"out{i}=%{name}" for i, name in enumerate(outputs))
    return parse_graph(f"{GIVEN} main {{ {nodes} return {returned} }}")


def fused(nodes: str, *outputs: str) -> list[str]:
    """The nodes after the pass, as text; the graph is as right as it was."""
    before = graph(nodes, *outputs)
    after = fuse_gated_linear.run(before)
    assert verify(after) == verify(before)
    return [format_step(step) for step in after.main]


def test_a_gate_joins_its_product() -> None:
    assert fused(f"{PRODUCT} {GATE}", "g") == [GATED]


def test_with_a_bias() -> None:
    assert fused(
        """
        %p = aten.linear.default(input=%x, weight=%w, bias=%b)
        %g = precast.gated_activation(x=%p, kind="gelu_tanh")
        """,
        "g",
    ) == ['%g: bfloat16[1, T, 6] = precast.gated_linear@1(input=%x, weight=%w, bias=%b, kind="gelu_tanh")']


def test_on_one_rank_of_several() -> None:
    (node,) = fused(f"%p = aten.linear.default(input=%x, weight=%s) {GATE}", "g")

    assert node.startswith("%g: bfloat16[1, T, floordiv(6, tp)] = precast.gated_linear@1(")


def test_two_in_a_row_and_what_stands_between() -> None:
    assert fused(
        f"""
        {PRODUCT}
        %n = aten.neg.default(self=%x)
        {GATE}
        %o = aten.linear.default(input=%g, weight=%v)
        %t = aten.add.Tensor(self=%o, other=%n)
        %q = aten.linear.default(input=%t, weight=%w)
        %h = precast.gated_activation(x=%q, kind="gelu")
        """,
        "h",
    ) == [
        GATED,
        "%n: bfloat16[1, T, 16] = aten.neg.default@1(self=%x)",
        "%o: bfloat16[1, T, 16] = aten.linear.default@1(input=%g, weight=%v)",
        "%t: bfloat16[1, T, 16] = aten.add.Tensor@1(self=%o, other=%n)",
        '%h: bfloat16[1, T, 6] = precast.gated_linear@1(input=%t, weight=%w, kind="gelu")',
    ]


def test_in_a_block() -> None:
    layered = parse_graph(
        f"""
        {GIVEN}
        block layer {{
          inputs {{ %x: bfloat16[1, T, 16] }} params {{ %w: bfloat16[12, 16] }}
          {PRODUCT} {GATE}
          return %g
        }}
        main {{ %y = call layer(x=%x, w=%w) return out=%y }}
        """
    )
    after = fuse_gated_linear.run(layered)

    assert [format_step(node) for node in after.blocks[0].nodes] == [GATED]
    assert after.main == layered.main


@pytest.mark.parametrize(
    ("nodes", "outputs"),
    [
        pytest.param(f"{PRODUCT} {GATE}", ("g", "p"), id="a result"),
        pytest.param(f"{PRODUCT} {GATE} %n = aten.neg.default(self=%p)", ("g", "n"), id="used elsewhere"),
        pytest.param(
            f'{PRODUCT} {GATE} %h = precast.gated_activation(x=%p, kind="gelu")', ("g", "h"), id="two gates"
        ),
        pytest.param('%g = precast.gated_activation(x=%wide, kind="silu")', ("g",), id="no product"),
        pytest.param(
            f"{PRODUCT} %n = aten.neg.default(self=%p) "
            '%g = precast.gated_activation(x=%n, kind="silu")', ("g",), id="something between",
        ),
    ],
)  # fmt: skip
def test_near_a_gate(nodes: str, outputs: tuple[str, ...]) -> None:
    before = graph(nodes, *outputs)

    assert fuse_gated_linear.run(before) == before


def test_the_block_keeps_what_it_returns() -> None:
    """A product that a block returns is not lost."""
    layered = parse_graph(
        f"""
        {GIVEN}
        block layer {{
          inputs {{ %x: bfloat16[1, T, 16] }} params {{ %w: bfloat16[12, 16] }}
          {PRODUCT} {GATE}
          return %g, %p
        }}
        main {{ %y, %z = call layer(x=%x, w=%w) return out=%y, more=%z }}
        """
    )

    assert fuse_gated_linear.run(layered) == layered


def test_nothing_is_left_to_do_after_it() -> None:
    once = fuse_gated_linear.run(graph(f"{PRODUCT} {GATE}", "g"))

    assert fuse_gated_linear.run(once) == once
    assert all(isinstance(step, Node) for step in once.main)
