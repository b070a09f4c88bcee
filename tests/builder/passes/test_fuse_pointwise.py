"""Regions of arithmetic become fused ops: graphs in, graphs out, and what must stay as it is."""

from __future__ import annotations

import pytest
from graph_text import parse_graph

from precast.builder.passes.lower.fuse_pointwise import fuse_pointwise
from precast.builder.passes.lower.spelled_out import spell_out_gates
from precast.ir import limits
from precast.ir.graph.schema import Graph, Node
from precast.ir.graph.text import format_step
from precast.ir.verify.verifier import verify

GIVEN = """
symbols { T: 1..64 R: 0..64 }
inputs { %x: bfloat16[1, T, 16] %y: bfloat16[1, T, 16] %ids: int64[1, T] %rows: int64[R] }
params {
  %w: bfloat16[16] = read("w", [16], bfloat16)
  %p: bfloat16[16, 16] = read("p", [16, 16], bfloat16)
}
"""


def graph(nodes: str, *outputs: str) -> Graph:
    """A graph of these nodes, over x, y [1, T, 16], ids [1, T], the weight w [16] and the matrix p [16, 16]."""
    returned = ", ".join(f"out{i}=%{name}" for i, name in enumerate(outputs))
    return parse_graph(f"{GIVEN} main {{ {nodes} return {returned} }}")


def fused(nodes: str, *outputs: str) -> list[str]:
    """The nodes after the passes, as text; the graph is still right."""
    before = graph(nodes, *outputs)
    after = fuse_pointwise.run(spell_out_gates.run(before))
    assert [each for each in verify(after) if each.rule != "IR011"] == [
        each for each in verify(before) if each.rule != "IR011"
    ]
    return [format_step(step) for step in after.main]


def ops_after(nodes: str, *outputs: str) -> list[str]:
    return [line.partition(" = ")[2].partition("(")[0] for line in fused(nodes, *outputs)]


def test_a_chain_becomes_one_node() -> None:
    assert fused(
        """
        %a = aten.div.Tensor(self=%x, other=30.0)
        %b = aten.tanh.default(self=%a)
        %c = aten.mul.Tensor(self=%b, other=30.0)
        """,
        "c",
    ) == [
        "%c: bfloat16[1, T, 16] = precast.fused@1(x0=%x, steps={%s0 = aten.div.Tensor@1(self=%x0, other=30.0), "
        "%s1 = aten.tanh.default@1(self=%s0), %s2 = aten.mul.Tensor@1(self=%s1, other=30.0), return %s2})"
    ]


def test_a_tree_with_a_norm_becomes_one_node_of_two_results() -> None:
    assert fused(
        """
        %s = aten.add.Tensor(self=%x, other=%y)
        %a = aten.to.dtype(self=%s, dtype=float32)
        %b = aten.pow.Tensor_Scalar(self=%a, exponent=2)
        %m = aten.mean.dim(self=%b, dim=[-1], keepdim=true)
        %r = aten.pow.Tensor_Scalar(self=%m, exponent=-0.5)
        %n = aten.mul.Tensor(self=%a, other=%r)
        %o = aten.to.dtype(self=%n, dtype=bfloat16)
        %z = aten.mul.Tensor(self=%o, other=%w)
        %l = aten.linear.default(input=%z, weight=%p)
        """,
        "l", "s",
    ) == [
        "%s: bfloat16[1, T, 16], %z: bfloat16[1, T, 16] = precast.fused@1(x0=%x, x1=%y, x2=%w, steps={"
        "%s0 = aten.add.Tensor@1(self=%x0, other=%x1), %s1 = aten.to.dtype@1(self=%s0, dtype=float32), "
        "%s2 = aten.pow.Tensor_Scalar@1(self=%s1, exponent=2), "
        "%s3 = aten.mean.dim@1(self=%s2, dim=[-1], keepdim=true), "
        "%s4 = aten.pow.Tensor_Scalar@1(self=%s3, exponent=-0.5), %s5 = aten.mul.Tensor@1(self=%s1, other=%s4), "
        "%s6 = aten.to.dtype@1(self=%s5, dtype=bfloat16), %s7 = aten.mul.Tensor@1(self=%s6, other=%x2), "
        "return %s0, %s7})",
        "%l: bfloat16[1, T, 16] = aten.linear.default@1(input=%z, weight=%p)",
    ]  # fmt: skip


def test_branches_join_where_they_meet() -> None:
    nodes = """
        %a = aten.neg.default(self=%x)
        %b = aten.silu.default(self=%y)
        %c = aten.mul.Tensor(self=%a, other=%b)
        """
    assert ops_after(nodes, "c") == ["precast.fused@1"]


def test_a_mask_stays_inside() -> None:
    nodes = """
        %m = aten.gt.Scalar(self=%x, other=0.5)
        %a = aten.where.self(condition=%m, self=%x, other=%y)
        """
    assert ops_after(nodes, "a") == ["precast.fused@1"]


def test_what_one_op_takes_is_made_together() -> None:
    """As a delta rule takes its decay and its beta, which have nothing else in common."""
    nodes = """
        %a = aten.sigmoid.default(self=%x)
        %b = aten.to.dtype(self=%y, dtype=float32)
        %c = aten.softplus.default(self=%b)
        %d = aten.linear.default(input=%y, weight=%p)
        %e = aten.to.dtype(self=%c, dtype=bfloat16)
        %f = aten.cat.default(tensors=[%a, %d, %e], dim=2)
        """
    assert fused(nodes, "f")[1].startswith("%a: bfloat16[1, T, 16], %e: bfloat16[1, T, 16] = precast.fused@1(x0=%x, ")
    assert ops_after(nodes, "f") == ["aten.linear.default@1", "precast.fused@1", "aten.cat.default@1"]


@pytest.mark.parametrize(
    ("why", "nodes"),
    [
        (
            "one is longer",
            """%a = aten.sigmoid.default(self=%x) %w2 = aten.cat.default(tensors=[%y, %y], dim=2)
            %b = aten.neg.default(self=%w2) %c = aten.cat.default(tensors=[%a, %b], dim=2)""",
        ),
        (
            "one is taken before the other can be made",
            """%a = aten.sigmoid.default(self=%x) %l = aten.linear.default(input=%a, weight=%p)
            %b = aten.neg.default(self=%l) %c = aten.cat.default(tensors=[%a, %b], dim=2)""",
        ),
        (
            "two ops take them",
            """%a = aten.sigmoid.default(self=%x) %b = aten.neg.default(self=%y)
            %l = aten.linear.default(input=%a, weight=%p) %m = aten.linear.default(input=%b, weight=%p)
            %c = aten.cat.default(tensors=[%l, %m], dim=2)""",
        ),
    ],
    ids=["longer", "before", "two"],
)
def test_what_is_made_apart(why: str, nodes: str) -> None:
    assert "precast.fused@1" not in ops_after(nodes, "c"), why


GATED_NORM = """
    %h: bfloat16[1, T, 2, 8] = aten.reshape.default(self=%x, shape=[1, T, 2, 8])
    %z: bfloat16[1, T, 2, 8] = aten.reshape.default(self=%y, shape=[1, T, 2, 8])
    %v: bfloat16[8] = aten.slice.Tensor(self=%w, dim=0, start=0, end=8)
    %n = precast.rms_norm(x=%h, weight=%v, eps=1e-06, offset=1.0, cast_before_scale=true)
    %g = aten.silu.default(self=%z)
    %o = aten.mul.Tensor(self=%n, other=%g)
    """


def test_a_norm_of_heads_joins_its_gate() -> None:
    *_, made = fused(GATED_NORM, "o")

    assert made == (
        "%o: bfloat16[1, T, 2, 8] = precast.fused@1(x0=%h, x1=%v, x2=%z, steps={"
        "%s0 = aten.to.dtype@1(self=%x0, dtype=float32), %s1 = aten.pow.Tensor_Scalar@1(self=%s0, exponent=2), "
        "%s2 = aten.mean.dim@1(self=%s1, dim=[-1], keepdim=true), %s3 = aten.add.Tensor@1(self=%s2, other=1e-06), "
        "%s4 = aten.rsqrt.default@1(self=%s3), %s5 = aten.mul.Tensor@1(self=%s0, other=%s4), "
        "%s6 = aten.add.Tensor@1(self=%x1, other=1.0), %s7 = aten.to.dtype@1(self=%s5, dtype=bfloat16), "
        "%s8 = aten.mul.Tensor@1(self=%s6, other=%s7), %s9 = aten.silu.default@1(self=%x2), "
        "%s10 = aten.mul.Tensor@1(self=%s8, other=%s9), return %s10})"
    )


SHARED_GATE = """
    %one: bfloat16[1, 16] = aten.slice.Tensor(self=%p, dim=0, start=0, end=1)
    %z = aten.linear.default(input=%y, weight=%p)
    %l = aten.linear.default(input=%x, weight=%one)
    %g = aten.sigmoid.default(self=%l)
    %o = aten.mul.Tensor(self=%g, other=%z)
    """


def test_a_product_of_one_output_joins_what_it_gates() -> None:
    *_, made = fused(SHARED_GATE, "o")

    assert made == (
        "%o: bfloat16[1, T, 16] = precast.fused@1(x0=%x, x1=%one, x2=%z, steps={"
        "%s0 = aten.to.dtype@1(self=%x0, dtype=float32), %s1 = aten.to.dtype@1(self=%x1, dtype=float32), "
        "%s2 = aten.mul.Tensor@1(self=%s0, other=%s1), %s3 = aten.sum.dim_IntList@1(self=%s2, dim=[-1], keepdim=true), "
        "%s4 = aten.to.dtype@1(self=%s3, dtype=bfloat16), %s5 = aten.sigmoid.default@1(self=%s4), "
        "%s6 = aten.mul.Tensor@1(self=%s5, other=%x2), return %s6})"
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("shape=[1, T, 2, 8]", "shape=[T, 16]", id="no heads"),
        pytest.param("%o = aten.mul.Tensor(self=%n, other=%g)", "%o = aten.neg.default(self=%n)", id="no gate"),
        pytest.param("other=%g)", "other=%g) %m = aten.cat.default(tensors=[%n, %o], dim=0)", id="taken by two"),
    ],
)
def test_norms_that_stay(old: str, new: str) -> None:
    nodes = GATED_NORM.replace(": bfloat16[1, T, 2, 8]", "").replace(": bfloat16[8]", "").replace(old, new)
    nodes = nodes.replace("end=8", "end=16") if "[T, 16]" in new else nodes

    assert "precast.rms_norm@1" in ops_after(nodes, "m" if "%m" in new else "o")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("end=1)", "end=16)", id="many outputs"),
        pytest.param("weight=%one)", "weight=%one, bias=%b)", id="with a bias"),
        pytest.param("aten.sigmoid.default", "aten.tanh.default", id="another gate"),
        pytest.param("other=%z)", "other=%z) %m = aten.add.Tensor(self=%o, other=%l)", id="taken by two"),
        pytest.param("other=%z)", "other=%wide)", id="it gates what is wider"),
    ],
)
def test_products_that_stay(old: str, new: str) -> None:
    more = """
        %wide = aten.cat.default(tensors=[%y, %y], dim=2)
        %b = aten.slice.Tensor(self=%w, dim=0, start=0, end=1)
        """
    nodes = SHARED_GATE.replace(": bfloat16[1, 16]", "")
    assert old in nodes

    assert ops_after(more + nodes.replace(old, new), "m" if "%m" in new else "o").count("aten.linear.default@1") == 2


def test_a_block_is_fused_once_for_all_its_calls() -> None:
    layered = parse_graph(
        GIVEN
        + """
        block layer {
          inputs { %i: bfloat16[1, T, 16] }
          params { %v: bfloat16[16] }
          caches { }
          %a = aten.mul.Tensor(self=%i, other=%v)
          %b = aten.add.Tensor(self=%a, other=%i)
          return %b
        }
        main { %h: bfloat16[1, T, 16] = call layer(i=%x, v=%w) %k: bfloat16[1, T, 16] = call layer(i=%h, v=%w)
          return out=%k }
        """
    )

    after = fuse_pointwise.run(layered)

    assert [node.op for node in after.blocks[0].nodes] == ["precast.fused"]
    assert after.main == layered.main


@pytest.mark.parametrize(
    ("why", "nodes", "outputs"),
    [
        ("one node alone", "%a = aten.neg.default(self=%x)", "a"),
        (
            "views lie between",
            """%a = aten.neg.default(self=%x) %v = aten.reshape.default(self=%a, shape=[T, 16])
            %b = aten.neg.default(self=%v)""",
            "b",
        ),
        (
            "other shapes: the rows of one are no rows of the other",
            """%a: bfloat16[1, T, 16] = aten.neg.default(self=%x)
            %u: bfloat16[1, 1, T, 16] = aten.unsqueeze.default(self=%y, dim=1)
            %e: bfloat16[1, 3, T, 16] = aten.expand.default(self=%u, size=[1, 3, T, 16])
            %b: bfloat16[1, 3, T, 16] = aten.add.Tensor(self=%e, other=%a)""",
            "b",
        ),
        (
            "a sum over tokens",
            """%a = aten.neg.default(self=%x) %b = aten.sum.dim_IntList(self=%a, dim=[1], keepdim=true)""",
            "b",
        ),
        (
            "a running sum",
            """%a = aten.neg.default(self=%x) %b = aten.cumsum.default(self=%a, dim=2)""",
            "b",
        ),
        (
            "a product between",
            """%a = aten.neg.default(self=%x) %l = aten.linear.default(input=%a, weight=%p)
            %b = aten.neg.default(self=%l)""",
            "b",
        ),
        (
            "integers, which may address memory",
            """%a = aten.add.Tensor(self=%ids, other=1) %b = aten.clamp.default(self=%a, min=0, max=7)""",
            "b",
        ),
        (
            "a general power",
            """%a = aten.neg.default(self=%x) %b = aten.pow.Tensor_Scalar(self=%a, exponent=2.5)""",
            "b",
        ),
        (
            "a number that depends on the step",
            """%a = aten.neg.default(self=%x) %b = aten.mul.Tensor(self=%a, other=T)""",
            "b",
        ),
        (
            "the second takes what is made of the first in between",
            """%a = aten.neg.default(self=%x) %l = aten.linear.default(input=%a, weight=%p)
            %b = aten.add.Tensor(self=%a, other=%l)""",
            "b",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 60 and "%" not in value else "",
)
def test_what_stays(why: str, nodes: str, outputs: str) -> None:
    assert "precast.fused@1" not in ops_after(nodes, outputs), why


def test_what_others_take_too_is_a_result() -> None:
    assert fused(
        """
        %a = aten.neg.default(self=%x)
        %b = aten.silu.default(self=%a)
        %l = aten.linear.default(input=%a, weight=%p)
        """,
        "b", "l",
    )[0].startswith("%a: bfloat16[1, T, 16], %b: bfloat16[1, T, 16] = precast.fused@1(x0=%x, ")  # fmt: skip


def test_a_mask_that_others_take_keeps_its_node() -> None:
    nodes = """
        %m = aten.gt.Scalar(self=%x, other=0.5)
        %a = aten.where.self(condition=%m, self=%x, other=%y)
        %c = aten.neg.default(self=%a)
        """
    assert ops_after(nodes, "c", "m") == ["aten.gt.Scalar@1", "precast.fused@1"]


def test_a_weight_s_own_arithmetic_that_others_take_keeps_its_node() -> None:
    nodes = """
        %a = aten.add.Tensor(self=%w, other=1.0)
        %b = aten.mul.Tensor(self=%x, other=%a)
        %c = aten.neg.default(self=%b)
        """
    assert ops_after(nodes, "c") == ["precast.fused@1"]
    assert ops_after(nodes, "c", "a") == ["aten.add.Tensor@1", "precast.fused@1"]


def test_operands_are_at_most_twelve() -> None:
    given = "".join(f"%v{i} = aten.linear.default(input=%x, weight=%p)\n" for i in range(13))
    sums = "%a1 = aten.add.Tensor(self=%v0, other=%v1)\n" + "".join(
        f"%a{i} = aten.add.Tensor(self=%a{i - 1}, other=%v{i})\n" for i in range(2, 13)
    )

    after = fuse_pointwise.run(graph(given + sums, "a12"))

    left = [node for node in after.main[13:] if isinstance(node, Node)]
    assert [(node.op, len(node.args) - 1) for node in left] == [("precast.fused", 12), ("aten.add.Tensor", 1)]


def test_steps_are_at_most_as_many_as_the_limit() -> None:
    count = limits.MAX_FUSED_STEPS + 6
    nodes = "%a0 = aten.neg.default(self=%x)\n" + "".join(
        f"%a{i} = aten.neg.default(self=%a{i - 1})\n" for i in range(1, count)
    )

    after = fuse_pointwise.run(graph(nodes, f"a{count - 1}"))

    lengths = [len(node.args["steps"].steps) for node in after.main]  # type: ignore[union-attr]
    assert lengths == [limits.MAX_FUSED_STEPS, 6]


def test_what_a_cache_holds_is_no_operand() -> None:
    """Between the two the cache may be written."""
    cached = parse_graph(
        """
        symbols { T: 1..64 B: 1..8 P: 1..64 }
        inputs { %x: float32[1, T, 4] %cu_seqlens: int32[(1 + B)] %slot_ids: int32[B] }
        pool s(pages=P)
        group s(pool=s, spec=state(shape=[1, 4], dtype=float32), slot_ids=%slot_ids) {
          slot s0(%held: float32[P, 1, 4])
        }
        main {
          %v = aten.reshape.default(self=%held, shape=[P, 4])
          %a = aten.neg.default(self=%v)
          %b = aten.neg.default(self=%a)
          %c = aten.neg.default(self=%b)
          return out=%c
        }
        """
    )

    after = fuse_pointwise.run(cached)

    assert [step.op for step in after.main if isinstance(step, Node)] == [
        "aten.reshape.default", "aten.neg.default", "precast.fused",
    ]  # fmt: skip


def test_the_pass_leaves_what_it_has_made() -> None:
    once = fuse_pointwise.run(graph("%a = aten.neg.default(self=%x) %b = aten.neg.default(self=%a)", "b"))

    assert fuse_pointwise.run(once) == once
