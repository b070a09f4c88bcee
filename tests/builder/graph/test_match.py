"""Patterns: what they match, what they bind, and what comes near and is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fx_text import read_graph

from precast.builder.graph.match import Add, Anything, Bind, Cast, Either, Mul, Number, Op, match

aten = torch.ops.aten

X, Y = Bind("x"), Bind("y")


def found(pattern: Any, lines: str) -> dict[str, str] | None:
    """What the pattern binds at the result of these lines over the inputs a, b and c: names of nodes, or literals."""
    inputs = "\n".join(f"{name}: input(float32, 1, T, 8)" for name in "abc")
    graph = read_graph(f"{inputs}\n{lines}\nreturn out").graph
    (output,) = [node for node in graph.nodes if node.op == "output"]
    bindings = match(pattern, output.args[0]["logits"])
    return None if bindings is None else {name: getattr(value, "name", value) for name, value in bindings.items()}


def test_names_are_bound_to_the_arguments() -> None:
    assert found(Op(aten.sub.Tensor, X, Y), "out = aten.sub.Tensor(a, b)") == {"x": "a", "y": "b"}


def test_order_counts_where_the_op_does_not_commute() -> None:
    subtracted = Op(aten.sub.Tensor, Op(aten.neg.default, X), Y)

    assert found(subtracted, "n = aten.neg(a)\nout = aten.sub.Tensor(n, b)") == {"x": "a", "y": "b"}
    assert found(subtracted, "n = aten.neg(a)\nout = aten.sub.Tensor(b, n)") is None


@pytest.mark.parametrize("order", ["n, b", "b, n"])
@pytest.mark.parametrize(("pattern", "op"), [(Add, "add"), (Mul, "mul")])
def test_sums_and_products_commute(pattern: Any, op: str, order: str) -> None:
    lines = f"n = aten.neg(a)\nout = aten.{op}.Tensor({order})"

    assert found(pattern(Op(aten.neg.default, X), Y), lines) == {"x": "a", "y": "b"}


def test_a_name_that_stands_twice_must_bind_one_node() -> None:
    square = Mul(X, X)

    assert found(square, "out = aten.mul.Tensor(a, a)") == {"x": "a"}
    assert found(square, "out = aten.mul.Tensor(a, b)") is None


def test_a_name_that_stands_twice_must_bind_one_literal() -> None:
    halves = Op(aten.cat.default, [_part(0, Number("half")), _part(Number("half"), Anything())], 2)
    lines = "l = aten.slice.Tensor(a, 2, 0, {}, 1)\nu = aten.slice.Tensor(a, 2, {}, 8, 1)\nout = aten.cat([l, u], 2)"

    assert found(halves, lines.format(4, 4)) == {"x": "a", "half": 4}
    assert found(halves, lines.format(5, 4)) is None


def _part(start: Any, end: Any) -> Op:
    return Op(aten.slice.Tensor, X, 2, start, end, 1)


def test_a_failed_order_leaves_no_bindings_behind() -> None:
    pattern = Mul(X, Op(aten.neg.default, X))

    assert found(pattern, "n = aten.neg(a)\nout = aten.mul.Tensor(n, a)") == {"x": "a"}


def test_another_op_is_no_match() -> None:
    assert found(Add(X, Y), "out = aten.sub.Tensor(a, b)") is None


def test_an_op_by_its_name() -> None:
    pattern = Op("aten.cos.default", X)

    assert found(pattern, "out = aten.cos(a)") == {"x": "a"}
    assert found(pattern, "out = aten.tanh(a)") is None


def test_an_argument_by_its_name() -> None:
    pattern = Op(aten.gelu.default, X, approximate=Bind("how"))

    assert found(pattern, "out = aten.gelu(a, approximate='tanh')") == {"x": "a", "how": "tanh"}
    assert found(pattern, "out = aten.gelu(a)") is None


def test_an_argument_that_the_pattern_does_not_know_is_no_match() -> None:
    assert found(Add(X, Y), "out = aten.add.Tensor(a, b, alpha=2)") is None
    assert found(Op(aten.pow.Tensor_Scalar, X), "out = aten.pow.Tensor_Scalar(a, 2)") is None


def test_a_missing_argument_matches_none() -> None:
    pattern = Op(aten.linear.default, X, Bind("w"), Bind("bias"))
    lines = "w = aten.select.int(b, 0, 0)\nw = aten.slice.Tensor(w, 0, 0, 8, 1)\nout = aten.linear(a, w)"

    bound = found(pattern, lines)

    assert bound is not None
    assert bound["bias"] is None


@pytest.mark.parametrize("literal", ["1", "True", "1.5"])
def test_literals_are_equal_in_type_and_value(literal: str) -> None:
    assert found(Mul(X, 1.0), "out = aten.mul.Tensor(a, 1.0)") == {"x": "a"}
    assert found(Mul(X, 1.0), f"out = aten.mul.Tensor(a, {literal})") is None


def test_a_number_is_no_node() -> None:
    assert found(Mul(X, Number("n")), "out = aten.mul.Tensor(a, 2.5)") == {"x": "a", "n": 2.5}
    assert found(Mul(X, Number("n")), "out = aten.mul.Tensor(a, b)") is None


def test_either_takes_the_first_that_matches() -> None:
    pattern = Either(Op(aten.neg.default, X), Y)

    assert found(pattern, "out = aten.neg(a)") == {"x": "a"}
    assert found(pattern, "out = aten.tanh(a)") == {"y": "tanh_default"}


def test_a_cast_may_be_missing() -> None:
    pattern = Op(aten.neg.default, Cast(X))

    assert found(pattern, "c = aten.to.dtype(a, bfloat16)\nout = aten.neg(c)") == {"x": "a"}
    assert found(pattern, "out = aten.neg(a)") == {"x": "a"}


def test_lists_match_item_by_item() -> None:
    pattern = Op(aten.cat.default, [X, Y], 2)

    assert found(pattern, "out = aten.cat([a, b], 2)") == {"x": "a", "y": "b"}
    assert found(pattern, "out = aten.cat([a, b, c], 2)") is None
    assert found(pattern, "out = aten.cat([a, b], 1)") is None
