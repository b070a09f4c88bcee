"""Fused ops in the language: which steps the shape rule takes, and steps in text, in bytes and in the verifier."""

from __future__ import annotations

import pytest
from graph_text import parse_graph, parse_steps

from precast.ir import limits
from precast.ir.encoding import decode_graph, encode_graph
from precast.ir.graph.schema import Const, Expr, Graph, Ref, Step, Steps, TensorType
from precast.ir.graph.text import format_graph
from precast.ir.ops import table as ops
from precast.ir.ops.op import ShapeError
from precast.ir.verify import extent
from precast.ir.verify.verifier import verify

GRAPH = """\
symbols {
  T: 1..64
}
inputs {
  %input_ids: int64[1, T]
}
params {
  %w: bfloat16[131, 16] = read("w", [131, 16], bfloat16)
  %n: bfloat16[16] = read("n", [16], bfloat16)
}
main {
  %h: bfloat16[1, T, 16] = precast.embedding@1(ids=%input_ids, weight=%w)
  %y: bfloat16[1, T, 16], %r: float32[1, T, 1] = precast.fused@1(x0=%h, x1=%n, steps={%s0 = aten.to.dtype@1(self=%x0, dtype=float32), %s1 = aten.mean.dim@1(self=%s0, dim=[-1], keepdim=true), %s2 = aten.clamp.default@1(self=%s0, min=-inf, max=0.5), %s3 = aten.mul.Tensor@1(self=%s2, other=%x1), %s4 = aten.to.dtype@1(self=%s3, dtype=bfloat16), return %s4, %s1})
  return logits=%y, means=%r
}
"""  # noqa: E501 - a node in text is one line


def of(dtype: str, *shape: Expr) -> TensorType:
    return TensorType(dtype, shape)  # type: ignore[arg-type]


def f32(*shape: Expr) -> TensorType:
    return of("float32", *shape)


X = f32(1, "T", 8)


def infer(steps: str | Steps, *operands: TensorType | None) -> tuple[TensorType, ...]:
    op = ops.lookup("precast.fused")
    assert op is not None
    given = dict.fromkeys((arg.name for arg in op.args), None) | {f"x{i}": each for i, each in enumerate(operands)}
    return op.shape_rule(given | {"steps": parse_steps(steps) if isinstance(steps, str) else steps})


def test_steps_come_back_from_text_and_bytes() -> None:
    graph = parse_graph(GRAPH)

    assert format_graph(graph) == GRAPH
    assert decode_graph(encode_graph(graph)) == graph
    assert verify(graph) == ()


@pytest.mark.parametrize(
    ("steps", "operands", "expected"),
    [
        # types are those of the ops one by one
        ("{%s0 = aten.add.Tensor(self=%x0, other=%x1), return %s0}", [of("bfloat16", "T", 8), f32(8)], f32("T", 8)),
        ("{%s0 = aten.gt.Scalar(self=%x0, other=1), %s1 = aten.where.self(condition=%s0, self=%x0, other=%x1), "
         "return %s1}", [X, f32("T", 1)], X),
        # one for each row, by itself and beside what fills the rows
        ("{%s0 = aten.sum.dim_IntList(self=%x0, dim=[2], keepdim=true), return %s0}", [X], f32(1, "T", 1)),
        # the same for all rows
        ("{%s0 = aten.add.Tensor(self=%x1, other=1.0), %s1 = aten.mul.Tensor(self=%x0, other=%s0), return %s1}",
         [X, f32(8)], X),
        ("{%s0 = aten.neg.default(self=%x0), return %s0}", [f32()], f32()),
        # columns of a step's number, where nothing sums them
        ("{%s0 = aten.neg.default(self=%x0), return %s0}", [f32(1, "T")], f32(1, "T")),
    ],
)  # fmt: skip
def test_steps_have_the_types_of_their_ops(steps: str, operands: list[TensorType], expected: TensorType) -> None:
    assert infer(steps, *operands) == (expected,)


@pytest.mark.parametrize(
    ("steps", "operands", "message"),
    [
        ("{%s0 = aten.cumsum.default(self=%x0, dim=-1), return %s0}", [X],
         "step s0, aten.cumsum.default: no fused op has such a step"),
        ("{%s0 = os.system(self=%x0), return %s0}", [X], "step s0, os.system: no fused op has such a step"),
        ("{%s0 = precast.rms_norm(x=%x0), return %s0}", [X], "precast.rms_norm: no fused op has such a step"),
        ("{%s0 = aten.add.Tensor(self=%x0), return %s0}", [X], "step s0, aten.add.Tensor: other: required, not given"),
        ("{%s0 = aten.neg.default(self=%x0, other=%x0), return %s0}", [X], "other: not an argument"),
        ("{%s0 = aten.neg.default(self=1.0), return %s0}", [X], "self: expected Tensor, found float 1.0"),
        ("{%s0 = aten.neg.default(self=%x1), return %s0}", [X], "x1 is no operand, and nothing that an earlier step"),
        ("{%s0 = aten.neg.default(self=%s0), return %s0}", [X], "s0 is no operand, and nothing that an earlier step"),
        ("{%s0 = aten.neg.default(self=%s1), %s1 = aten.neg.default(self=%x0), return %s0}", [X], "s1 is no operand"),
        ("{%s0 = aten.neg.default(self=%h), return %s0}", [X], "h is no operand"),
        ("{%s0 = aten.silu.default(self=%x0), return %s0}", [of("int64", "T", 8)], "step s0.*self: expected dtype"),
        ("{%s0 = aten.neg.default(self=%x0), return %s0}", [of("float8_e4m3fn", "T", 8)], "x0: expected dtype"),
        ("{%s0 = aten.to.dtype(self=%x0, dtype=float8_e4m3fn), return %s0}", [X], "the result: expected dtype"),
        ("{%s0 = aten.pow.Tensor_Scalar(self=%x0, exponent=2.5), return %s0}", [X], "exponent: expected one of 2, 3"),
        ("{%s0 = aten.add.Tensor(self=%x0, other=T), return %s0}", [X], "a size of a step is no argument"),
        # results that could address memory, or that no program of a kernel is alone to write
        ("{%s0 = aten.neg.default(self=%x0), return %s0}", [of("int64", 1, "T")], "the result s0: expected dtype"),
        ("{%s0 = aten.gt.Scalar(self=%x0, other=0), return %s0}", [X], "the result s0: expected dtype"),
        ("{%s0 = aten.neg.default(self=%x1), %s1 = aten.mul.Tensor(self=%x0, other=%s0), return %s1, %s0}",
         [X, f32(8)], "the result s0 is the same for all rows"),
        # sums
        ("{%s0 = aten.sum.dim_IntList(self=%x0, dim=[1], keepdim=true), return %s0}", [X], "the last dimension, kept"),
        ("{%s0 = aten.sum.dim_IntList(self=%x0, dim=[1, 2], keepdim=true), return %s0}", [X],
         "the last dimension, kept"),
        ("{%s0 = aten.sum.dim_IntList(self=%x0, dim=[2]), return %s0}", [X], "the last dimension, kept"),
        ("{%s0 = aten.mean.dim(self=%x0, dim=[-1], keepdim=true), return %s0}", [f32(1, "T")],
         "columns of known number"),
        ("{%s0 = aten.sum.dim_IntList(self=%x0, dim=[-1], keepdim=true), return %s0}", [of("int64", "T", 8)],
         "self: expected dtype"),
        ("{%s0 = aten.sum.dim_IntList(self=%x1, dim=[-1], keepdim=true), %s1 = aten.add.Tensor(self=%s0, other=%x0), "
         "return %s1}", [X, f32(1, "T", 1)], "the last dimension of x1: expected shape"),
        # one space
        ("{%s0 = aten.neg.default(self=%x1), %s1 = aten.add.Tensor(self=%s0, other=%x0), return %s1}",
         [f32(4, "T", 8), f32(1, "T", 8)], "step s0: .* is no part of the rows of"),
        ("{%s0 = aten.neg.default(self=%x1), %s1 = aten.add.Tensor(self=%x0, other=%x0), return %s0, %s1}",
         [f32("T", 8), f32("T", 7)], "don't broadcast"),
        # nothing for nothing
        ("{%s0 = aten.neg.default(self=%x0), return %s0}", [X, X], "nothing takes x1"),
        ("{%s0 = aten.neg.default(self=%x0), %s1 = aten.neg.default(self=%x0), return %s1}", [X], "nothing takes s0"),
        ("{%s0 = aten.neg.default(self=%x0), return %s0, %s0}", [X], "results: expected each once"),
        ("{%s0 = aten.neg.default(self=%x0), %s1 = aten.neg.default(self=%s0), return }", [X], "nothing takes s1"),
        ("{%s0 = aten.neg.default(self=%x0), return %s0, %x0}", [X], "x0 is returned, and no step makes it"),
        ("{%s0 = aten.neg.default(self=%x0), return %s0, %s7}", [X], "s7 is returned, and no step makes it"),
        ("{return %x0}", [X], "steps: expected 1 to 64, found 0"),
        ("{%s0 = aten.neg.default(self=%x1), return %s0}", [None, X], "x0: required before x1, not given"),
    ],
)  # fmt: skip
def test_what_no_kernel_could_compute_is_refused(steps: str, operands: list[TensorType | None], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        infer(steps, *operands)


def chain(count: int) -> Steps:
    """x0, so often negated."""
    steps = [Step("aten.neg.default", {"self": Ref("x0" if i == 0 else f"s{i - 1}")}) for i in range(count)]
    return Steps(tuple(steps), (f"s{count - 1}",))


def test_steps_are_at_most_as_many_as_the_limit() -> None:
    assert infer(chain(limits.MAX_FUSED_STEPS), X) == (X,)
    with pytest.raises(ShapeError, match="steps: expected 1 to 64, found 65"):
        infer(chain(limits.MAX_FUSED_STEPS + 1), X)


def test_results_are_at_most_as_many_as_the_limit() -> None:
    steps = tuple(Step("aten.mul.Tensor", {"self": Ref("x0"), "other": Const(float(i))}) for i in range(5))
    names = tuple(f"s{i}" for i in range(5))

    assert infer(Steps(steps[:4], names[:4]), X) == (X,) * 4
    with pytest.raises(ShapeError, match="results: expected 1 to 4, found 5"):
        infer(Steps(steps, names), X)


def small(steps: str) -> Graph:
    return parse_graph(GRAPH.replace("%s3 = aten.mul.Tensor@1(self=%s2, other=%x1)", steps))


def test_a_number_that_is_none_is_refused_in_a_step() -> None:
    graph = small("%s3 = aten.mul.Tensor@1(self=%s2, other=nan)")

    assert [(each.rule, each.message) for each in verify(graph)] == [("IR004", "steps: not a number")]


def test_steps_and_their_arguments_are_counted() -> None:
    graph = parse_graph(GRAPH)

    counts = {what: found for what, found, _ in extent.counts(graph)}

    assert counts["nodes and calls"] == counts["nodes over all calls"] == 2 + 5
    # those of the embedding, the operands, and those of each step
    assert counts["arguments over all calls"] == 2 + 2 + (2 + 3 + 3 + 2 + 2)
