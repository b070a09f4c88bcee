"""What is left out of a graph once the sizes of its world are numbers, and what stays."""

from __future__ import annotations

import pytest
from graph_text import parse_graph

from precast.ir.graph.plain import plain
from precast.ir.graph.schema import ShardPlan, World
from precast.ir.graph.text import format_graph, format_step
from precast.ir.graph.world import bound, refusal, unsharded

HEAD = 'symbols { T: 1.. } inputs { %x: float32[1, T, 8] } params { %w: float32[8] = read("w", [8], float32) }'


@pytest.mark.parametrize(
    "step",
    [
        "aten.slice.Tensor(self=%x, dim=2, start=0, end=8)",
        "aten.slice.Tensor(self=%x, dim=2, start=dim(0), end=dim(8))",
        "aten.add.Tensor(self=%x, other=dim(0))",
        "aten.sub.Tensor(self=%x, other=dim(0))",
        "aten.mul.Tensor(self=%x, other=dim(1))",
    ],
)
def test_a_step_that_gives_what_it_takes_is_left_out(step: str) -> None:
    block = f"block b {{ inputs {{ %x: float32[1, T, 8] }} %y = {step} %z = aten.neg.default(self=%y) return %z, %y }}"
    main = (
        f"main {{ %y = {step} %a, %b = call b(x=%y) %c = aten.cat.default(tensors=[%b, %y], dim=1) return c=%c, y=%y }}"
    )
    graph = plain(parse_graph(f"{HEAD} {block} {main}"))

    assert [format_step(node) for node in graph.blocks[0].nodes] == [
        "%z: float32[1, T, 8] = aten.neg.default@1(self=%x)"
    ]
    assert graph.blocks[0].outputs == ("z", "x")
    assert [format_step(node) for node in graph.main] == [
        "%a: float32[1, T, 8], %b: float32[1, T, 8] = call b(x=%x)",
        "%c: float32[1, (2 * T), 8] = aten.cat.default@1(tensors=[%b, %x], dim=1)",
    ]
    assert graph.outputs == {"c": "c", "y": "x"}


@pytest.mark.parametrize(
    "step",
    [
        "aten.slice.Tensor(self=%x, dim=2, start=0, end=7)",
        "aten.slice.Tensor(self=%x, dim=2, start=1, end=8)",
        "aten.slice.Tensor(self=%x, dim=2, start=0, end=8, step=2)",
        "aten.add.Tensor(self=%x, other=0)",
        "aten.mul.Tensor(self=%x, other=dim(0))",
        "aten.div.Tensor(self=%x, other=dim(1))",
    ],
)
def test_a_step_that_does_something_or_that_the_model_has_stays(step: str) -> None:
    graph = plain(parse_graph(f"{HEAD} main {{ %y = {step} return y=%y }}"))

    assert len(graph.main) == 1


def test_sizes_that_are_numbers_are_literals() -> None:
    graph = parse_graph(f"{HEAD} main {{ %y = aten.reshape.default(self=%x, shape=[1, T, dim(4), 2]) return y=%y }}")

    (node,) = plain(graph).main

    assert format_step(node).endswith("shape=[1, T, 4, 2])")


SPLIT = """
symbols { T: 1.. ep: 1..1 rank: 0..1 tp: 1..2 }
inputs { %ids: int64[1, T] }
params {
  %table: float32[ceildiv(5, tp), 8] = slice(
    concat([read("t", [5, 8], float32), slice(read("t", [5, 8], float32), dim=0, start=0, length=1)], dim=0),
    dim=0, start=(ceildiv(5, tp) * rank), length=ceildiv(5, tp))
}
shards { world(tp=1, ep=[1]) world(tp=2, ep=[1]) }
main {
  %part = precast.sharded_embedding(ids=%ids, weight=%table, start=(ceildiv(5, tp) * rank), scale=2.0)
  %y = precast.all_reduce(x=%part, group="tp")
  return y=%y
}
"""
ALONE = """
symbols { T: 1.. }
inputs { %ids: int64[1, T] }
params { %table: float32[5, 8] = read("t", [5, 8], float32) }
main {
  %part = precast.embedding(ids=%ids, weight=%table, scale=2.0)
  return y=%part
}
"""


def test_one_rank_has_the_graph_of_the_whole_model() -> None:
    assert format_graph(unsharded(parse_graph(SPLIT))) == format_graph(parse_graph(ALONE))


def test_a_rank_of_two_has_its_numbers() -> None:
    graph = bound(parse_graph(SPLIT), {"tp": 2, "rank": 1, "ep": 1})

    assert [symbol.name for symbol in graph.symbols] == ["T"]
    assert graph.shards == ShardPlan()
    assert graph.params[0].type.shape == (3, 8)
    assert [format_step(node) for node in graph.main] == [
        "%part: float32[1, T, 8] = precast.sharded_embedding@1(ids=%ids, weight=%table, start=3, scale=2.0)",
        '%y: float32[1, T, 8] = precast.all_reduce@1(x=%part, group="tp")',
    ]


def test_a_graph_without_the_worlds_symbols_stays_as_it_is() -> None:
    graph = parse_graph(ALONE)

    assert unsharded(graph) is graph


def test_worlds_that_are_not_planned_are_refused_with_those_that_are() -> None:
    plan = ShardPlan((World(1), World(2), World(4, (1, 2))))

    assert [refusal(plan, *world) for world in ((1, 1), (2, 1), (4, 2))] == [None, None, None]
    assert refusal(plan, 3, 1) == "tp is 3, and the bundle can be split over 1, 2, 4 ranks"
    assert refusal(plan, 4, 4) == "ep is 4, and over 4 ranks the experts can be split into 1, 2 parts"
    assert refusal(ShardPlan(), 2, 1) == "tp is 2, and the bundle can be split over 1 ranks"
