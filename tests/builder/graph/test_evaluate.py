"""Parts of a graph on real numbers: what has a value, and what has none."""

from __future__ import annotations

import pytest
import torch
from fx_text import SmallGraph, read_graph
from torch import fx

from precast.builder.graph.evaluate import NotComputable, evaluate, example_inputs

SOURCE = """
input_ids: input(int64, 1, T)
positions: input(int64, 1, T)
cu_seqlens: input(int32, B1)
x: input(float32, 1, T, 2)
w: param(float32, 2)
c: constant(float32, [1.0, 2.0])
doubled = aten.mul.Tensor(c, 2.0)
scaled = aten.mul.Tensor(x, doubled)
weighed = aten.mul.Tensor(scaled, w)
count = aten.sym_size.int(input_ids, 1)
at = aten.arange.default(count)
distance = aten.sub.Tensor(positions, at)
low, rows = aten.sort.default(scaled, 1)
return weighed, distance, low
"""


@pytest.fixture
def source() -> SmallGraph:
    return read_graph(SOURCE)


def node_of(source: SmallGraph, name: str) -> fx.Node:
    """The first node of an op, or the placeholder, of this name."""
    return next(node for node in source.graph.nodes if name in (node.name, str(node.target)))


def test_constants_have_values_of_their_own(source: SmallGraph) -> None:
    doubled = node_of(source, "aten.mul.Tensor")

    assert evaluate(doubled, {}, source.ctx).tolist() == [2.0, 4.0]
    assert evaluate(node_of(source, "c"), {}, source.ctx).tolist() == [1.0, 2.0]


def test_a_known_value_stands_for_its_node(source: SmallGraph) -> None:
    x = torch.tensor([[[1.0, 1.0], [3.0, -1.0]]])
    doubled, scaled, *_ = [node for node in source.graph.nodes if str(node.target) == "aten.mul.Tensor"]

    assert evaluate(scaled, {node_of(source, "x"): x}, source.ctx).tolist() == [[[2.0, 4.0], [6.0, -4.0]]]
    found = evaluate(scaled, {node_of(source, "x"): x, doubled: torch.tensor(10.0)}, source.ctx)
    assert found.tolist() == [[[10.0, 10.0], [30.0, -10.0]]]


def test_one_of_several_results(source: SmallGraph) -> None:
    x = torch.tensor([[[3.0, 1.0], [1.0, 2.0]]])

    low = evaluate(node_of(source, "getitem"), {node_of(source, "x"): x}, source.ctx)

    assert low.tolist() == [[[2.0, 4.0], [6.0, 8.0]]]


def test_what_depends_on_an_input_or_a_param_has_no_value(source: SmallGraph) -> None:
    _, scaled, weighed = [node for node in source.graph.nodes if str(node.target) == "aten.mul.Tensor"]

    with pytest.raises(NotComputable, match=r"^x$"):
        evaluate(scaled, {}, source.ctx)
    with pytest.raises(NotComputable, match=r"^w$"):
        evaluate(weighed, {node_of(source, "x"): torch.zeros(1, 2, 2)}, source.ctx)


def test_example_inputs_are_one_sequence(source: SmallGraph) -> None:
    known = example_inputs(source.graph, 5)

    assert {node.name: value.tolist() for node, value in known.items()} == {
        "input_ids": [[0, 1, 2, 3, 4]],
        "positions": [[0, 1, 2, 3, 4]],
        "cu_seqlens": [0, 5],
    }
    assert [value.dtype for value in known.values()] == [torch.int64, torch.int64, torch.int32]
    assert evaluate(node_of(source, "aten.sub.Tensor"), known, source.ctx).tolist() == [[0, 0, 0, 0, 0]]


def test_example_rope_lengths_are_those_of_the_sequence() -> None:
    source = read_graph("rope_lengths: input(int64, 1, T)\ny = aten.add.Tensor(rope_lengths, 1)\nreturn y")

    known = example_inputs(source.graph, 3)

    assert evaluate(node_of(source, "aten.add.Tensor"), known, source.ctx).tolist() == [[4, 4, 4]]


def test_devices_of_the_trace_are_the_cpu() -> None:
    source = read_graph("x: input(float32, T)\nreturn x")
    (x,) = [node for node in source.graph.nodes if node.op == "placeholder"]
    with source.graph.inserting_after(x):
        made = source.graph.call_function(torch.ops.aten.full.default, ([2], 3.0), {"device": torch.device("meta")})
    with source.graph.inserting_after(made):
        moved = source.graph.call_function(torch.ops.aten.to.device, (made, torch.device("meta"), torch.float64))

    found = evaluate(moved, {}, source.ctx)

    assert (found.device.type, found.dtype, found.tolist()) == ("cpu", torch.float64, [3.0, 3.0])


def test_exact_numbers_are_not_rounded_to_half_precision() -> None:
    source = read_graph(
        "c: constant(float32, [0.1, 300.5])\nlow = aten.to.dtype(c, bfloat16)\ny = aten.add.Tensor(low, 1.0)\nreturn y"
    )
    y = node_of(source, "aten.add.Tensor")

    rounded, exact = evaluate(y, {}, source.ctx), evaluate(y, {}, source.ctx, exact=True)

    assert (rounded.dtype, rounded.tolist()) == (torch.bfloat16, [1.1015625, 300.0])
    torch.testing.assert_close(exact, torch.tensor([1.1, 301.5]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_exact_numbers_of_other_types_keep_them(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    source = read_graph(f"c: constant({name}, [3])\ny = aten.add.Tensor(c, c)\nreturn y")

    found = evaluate(node_of(source, "aten.add.Tensor"), {}, source.ctx, exact=True)

    assert (found.dtype, found.tolist()) == (dtype, [6])


@pytest.mark.parametrize(("op", "value"), [("zeros_like", 0), ("ones_like", 1)])
def test_what_is_as_large_as_a_param_makes_it_has_a_value(op: str, value: int) -> None:
    source = read_graph(
        "input_ids: input(int64, 1, T)\ntable: param(float32, 9, 2)\nx = aten.embedding(table, input_ids)\n"
        f"y = aten.{op}(x, dtype=int32)\nreturn y"
    )
    y = node_of(source, f"aten.{op}.default")

    found = evaluate(y, example_inputs(source.graph, 3), source.ctx)

    assert (found.dtype, found.tolist()) == (torch.int32, [[[value, value]] * 3])
    with pytest.raises(NotComputable, match=y.name):
        evaluate(y, {}, source.ctx)
