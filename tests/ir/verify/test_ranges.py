"""What integers a value can be: each op by a row, and none claimed that torch would leave.

`%x` is -2 to 3, `%y` 5 to 7, `%w` 100 to 200 in rows of nine; `%f` are floats.
"""

from __future__ import annotations

import pytest
import torch
from graph_text import parse_graph
from hypothesis import given
from hypothesis import strategies as st

from precast.ir.graph.schema import Graph
from precast.ir.verify.facts import Facts
from precast.ir.verify.ranges import Range, follow

GIVEN = {"x": Range(-2, 3), "y": Range(5, 7), "w": Range(100, 200)}
ALL, INT8, BOOL = Range(-(2**63), 2**63 - 1), Range(-128, 127), Range(0, 1)
NOT_X = "%below = aten.lt.Scalar(self=%x, other=0) %c = aten.logical_not.default(self=%below) "
TWO = "%a = aten.ge.Scalar(self=%x, other=1) %b = aten.le.Scalar(self=%x, other=2) "
PICK = "%r = aten.where.self(condition=%c, self=%x, other=%y)"
ELSE = "%r = aten.where.self(condition=%c, self=%y, other=%x)"

ROWS = [
    # arithmetic
    ("%r = aten.add.Tensor(self=%x, other=%y)", (3, 10)),
    ("%r = aten.add.Tensor(self=%x, other=-4)", (-6, -1)),
    ("%r = aten.sub.Tensor(self=%x, other=%y)", (-9, -2)),
    ("%r = aten.rsub.Scalar(self=%x, other=10)", (7, 12)),
    ("%r = aten.mul.Tensor(self=%x, other=%y)", (-14, 21)),
    ("%r = aten.mul.Tensor(self=%x, other=-3)", (-9, 6)),
    ("%r = aten.mul.Tensor(self=%x, other=%x)", (-6, 9)),
    ("%r = aten.clamp.default(self=%x, min=0)", (0, 3)),
    ("%r = aten.clamp.default(self=%x, min=none, max=1)", (-2, 1)),
    ("%r = aten.clamp.default(self=%x, min=5, max=8)", (5, 5)),
    ("%r = aten.full_like.default(self=%x, fill_value=4)", (4, 4)),
    ("%r: int32[1, T] = aten.to.dtype(self=%x, dtype=int32)", (-2, 3)),
    ("%r = aten.bitwise_xor.Tensor(self=%w, other=%w)", (0, 255)),
    ("%r = aten.bitwise_xor.Tensor(self=%x, other=%y)", ALL),
    ("%r = aten.remainder.Tensor(self=%x, other=%y)", (0, 6)),
    ("%n = aten.rsub.Scalar(self=%y, other=0) %r = aten.remainder.Tensor(self=%x, other=%n)", (-6, 0)),
    ("%one = aten.full_like.default(self=%y, fill_value=1) %r = aten.remainder.Tensor(self=%y, other=%one)", (0, 0)),
    # by 0 it may be anything
    ("%r = aten.remainder.Tensor(self=%y, other=%x)", ALL),
    ("%z = aten.mul.Tensor(self=%y, other=0) %r = aten.remainder.Tensor(self=%y, other=%z)", ALL),
    ("%z = aten.sub.Tensor(self=%y, other=5) %r = aten.remainder.Tensor(self=%y, other=%z)", ALL),
    # what leaves the type may be anything
    ("%r: int8[1, T, 9] = aten.to.dtype(self=%w, dtype=int8)", INT8),
    ("%r = aten.mul.Tensor(self=%y, other=2305843009213693952)", ALL),
    ("%r: int64[1, T] = aten.to.dtype(self=%f, dtype=int64)", ALL),
    # each element is one of an argument
    ("%r = aten.reshape.default(self=%x, shape=[T, 1])", (-2, 3)),
    ("%r = aten.cat.default(tensors=[%x, %y], dim=0)", (-2, 7)),
    ("%r = aten.minimum.default(self=%x, other=%y)", (-2, 7)),
    ("%r = aten.gather.default(self=%w, dim=2, index=%i)", (100, 200)),
    # places and choices
    ("%v, %r = aten.topk.default(self=%scores, k=3)", (0, 8)),
    ("%v, %r = aten.sort.default(self=%w, dim=0)", (0, 0)),
    ("%v, %r = aten.max.dim(self=%w, dim=2)", (0, 8)),
    ("%r, %i2 = aten.max.dim(self=%w, dim=2)", ALL),
    ("%r = aten.argmax.default(self=%w, dim=2)", (0, 8)),
    ("%v, %r = aten.topk.default(self=%scores, k=1, dim=0)", ALL),
    ("%r = aten.one_hot.default(self=%y, num_classes=8)", BOOL),
    ('%v, %r = precast.route(logits=%scores, bias=none, scoring="softmax", top_k=2, normalise=true, dtype=float32)',
     (0, 8)),
    ("%r = aten.lt.Scalar(self=%x, other=0)", BOOL),
    # what a condition says of what it compares
    (f"%c = aten.lt.Scalar(self=%x, other=1) {PICK}", (-2, 7)),
    ("%c = aten.lt.Scalar(self=%x, other=1) %r = aten.masked_fill.Scalar(self=%x, mask=%c, value=9)", (1, 9)),
    ("%c = aten.le.Scalar(self=%x, other=1) %r = aten.masked_fill.Scalar(self=%x, mask=%c, value=9)", (2, 9)),
    ("%c = aten.gt.Scalar(self=%x, other=1) %r = aten.masked_fill.Scalar(self=%x, mask=%c, value=-9)", (-9, 1)),
    ("%c = aten.ge.Scalar(self=%x, other=1) %r = aten.masked_fill.Scalar(self=%x, mask=%c, value=-9)", (-9, 0)),
    (f"%c = aten.ge.Scalar(self=%x, other=0) {PICK}", (0, 7)),
    (f"%c = aten.gt.Scalar(self=%x, other=0) {ELSE}", (-2, 7)),
    (f"{NOT_X}{PICK}", (0, 7)),
    (f"{TWO}%c = aten.minimum.default(self=%a, other=%b) {PICK}", (1, 7)),
    (f"{TWO}%c = aten.mul.Tensor(self=%a, other=%b) {PICK}", (1, 7)),
    (f"{TWO}%c = aten.maximum.default(self=%a, other=%b) {PICK}", (-2, 7)),
    (f"{TWO}%c = aten.mul.Tensor(self=%a, other=%b) {ELSE}", (-2, 7)),
    ("%a = aten.lt.Scalar(self=%x, other=0) %b = aten.gt.Scalar(self=%x, other=2) "
     "%c = aten.maximum.default(self=%a, other=%b) %r = aten.masked_fill.Scalar(self=%x, mask=%c, value=1)", (0, 2)),
    ("%a = aten.lt.Scalar(self=%x, other=0) %b = aten.gt.Scalar(self=%x, other=2) "
     "%c = aten.minimum.default(self=%a, other=%b) %r = aten.masked_fill.Scalar(self=%x, mask=%c, value=1)", (-2, 3)),
    ("%c = aten.lt.Scalar(self=%y, other=0) %r = aten.masked_fill.Scalar(self=%x, mask=%c, value=1)", (-2, 3)),
]  # fmt: skip


def graph(steps: str) -> Graph:
    return parse_graph(f"""
        symbols {{ T: 1.. }}
        inputs {{
          %x: int64[1, T] %y: int64[1, T] %w: int64[1, T, 9] %i: int64[1, T, 9] %f: float32[1, T]
          %scores: float32[T, 9]
        }}
        main {{ {steps} return r=%r }}
    """)


def found(steps: str) -> Range:
    facts = Facts(graph(steps))
    return follow(facts.main.steps, facts.main.types, GIVEN)["r"]


@pytest.mark.parametrize(("steps", "expected"), ROWS, ids=[steps for steps, _ in ROWS])
def test_the_range_of(steps: str, expected: tuple[int, int]) -> None:
    assert found(steps) == Range(*expected)


TORCH = {
    # what takes one or two tensors of integers, by the text and in torch
    "aten.add.Tensor(self={0}, other={1})": torch.add,
    "aten.sub.Tensor(self={0}, other={1})": torch.sub,
    "aten.mul.Tensor(self={0}, other={1})": torch.mul,
    "aten.bitwise_xor.Tensor(self={0}, other={1})": torch.bitwise_xor,
    "aten.remainder.Tensor(self={0}, other=%y)": lambda a, b: torch.remainder(a, Y),
    "aten.minimum.default(self={0}, other={1})": torch.minimum,
    "aten.maximum.default(self={0}, other={1})": torch.maximum,
    "aten.rsub.Scalar(self={0}, other=3)": lambda a, b: 3 - a,
    "aten.clamp.default(self={0}, min=-4, max=6)": lambda a, b: a.clamp(-4, 6),
    "aten.masked_fill.Scalar(self={0}, mask=%low, value=1)": lambda a, b: a.masked_fill(LOW, 1),
    "aten.where.self(condition=%low, self={0}, other={1})": lambda a, b: torch.where(LOW, a, b),
    "aten.where.self(condition=%mid, self={0}, other={1})": lambda a, b: torch.where(MID, a, b),
}
X, Y = (torch.arange(GIVEN[name].low, GIVEN[name].high + 1) for name in ("x", "y"))
X, Y = torch.cartesian_prod(X, Y).T
LOW, MID = X < 1, (X >= 0) & (X <= 2)
CONDITIONS = (
    "%low = aten.lt.Scalar(self=%x, other=1) %not_neg = aten.ge.Scalar(self=%x, other=0) "
    "%at_most = aten.le.Scalar(self=%x, other=2) %mid = aten.mul.Tensor(self=%not_neg, other=%at_most)"
)


@given(
    st.lists(st.tuples(st.sampled_from(sorted(TORCH)), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5)
)
def test_no_value_that_torch_computes_is_outside(program: list[tuple[str, int, int]]) -> None:
    names, values, steps = ["%x", "%y"], [X, Y], [CONDITIONS]
    for place, (text, first, second) in enumerate(program):
        a, b = first % len(names), second % len(names)
        values.append(TORCH[text](values[a], values[b]))
        steps.append(f"%s{place} = " + text.format(names[a], names[b]))
        names.append(f"%s{place}")
    known = found(" ".join([*steps, f"%r = aten.mul.Tensor(self={names[-1]}, other=1)"]))

    assert known.low <= int(values[-1].min())
    assert int(values[-1].max()) <= known.high
