"""Placements, and graphs bound to a world."""

from __future__ import annotations

import re
import typing

import msgspec
import pytest
from graph_text import parse_graph

from precast.ir.errors import BundleError, RequestError
from precast.ir.graph import schema
from precast.ir.graph.schema import Apply, Expr, Graph
from precast.ir.graph.text import format_graph
from precast.ir.verify import verifier
from precast.loader.placement import Placement, bind_world, check_world, place
from precast.loader.torch_device import CpuDevice

SHARDED = """\
symbols {{
  B: 1..
  P: 1..
  L: 1..
  T: 1..64{world}
}}
inputs {{
  %x: float32[1, T, 16]
  %a: int32[L]
  %b: int32[(1 + B)]
  %c: int32[B]
  %d: int64[T]
}}
params {{
  %w: float32[{rows}, 16] = cast(slice(read("w", [24, 16]), dim=0, start={first}, length={rows}), float32)
  %tied: float32[{rows}, 16] = tie(%w)
}}
pool kv(pages=P, pages_per_slab=1)
group full(pool=kv, spec=paged(num_kv_heads={heads}, head_size=8, value_size=8, dtype=float32, page_size=4, window=none), page_indices=%a, page_indptr=%b, page_start=%c, slot_mapping=%d) {{
  slot l0(%k: float32[P, 4, {heads}, 8], %v: float32[P, 4, {heads}, 8])
}}
{plan}block layer {{
  inputs {{
    %x: float32[1, T, 16]
  }}
  params {{
    %w: float32[{rows}, 16]
  }}
  %h: float32[1, T, {rows}] = aten.linear.default@1(input=%x, weight=%w)
  %y: float32[1, T, 4, {columns}] = aten.reshape.default@1(self=%h, shape=[1, T, 4, {column_arg}])
  return %y
}}
main {{
  %y: float32[1, T, 4, {columns}] = call layer(x=%x, w=%tied)
  return y=%y
}}
"""  # noqa: E501
WORLD = {
    "world": "\n  ep: 1..1\n  rank: 0..3\n  tp: 1..4",
    "plan": "shards {\n  world(tp=1, ep=[1])\n  world(tp=2, ep=[1])\n}\n",
    "rows": "(4 * floordiv(6, tp))",
    "first": "(4 * floordiv(6, tp) * rank)",
    "heads": "ceildiv(4, tp)",
    "columns": "floordiv(6, tp)",
    "column_arg": "floordiv(6, tp)",
}
SECOND_OF_TWO = {
    "world": "", "plan": "", "rows": "12", "first": "12", "heads": "2", "columns": "3", "column_arg": "3",
}  # fmt: skip


def at(rank: int, tp: int, ep: int = 1) -> Placement:
    return Placement(rank, tp, ep, CpuDevice())


def graph_of(**sizes: str) -> Graph:
    graph = parse_graph(SHARDED.format(**sizes))
    verifier.check(graph)
    return graph


def test_a_rank_of_two() -> None:
    bound = bind_world(graph_of(**WORLD), at(1, 2))

    assert format_graph(bound) == format_graph(graph_of(**SECOND_OF_TWO))


def test_a_graph_without_a_world_is_left_alone() -> None:
    graph = graph_of(**SECOND_OF_TWO)
    assert bind_world(graph, at(3, 4)) is graph


@pytest.mark.parametrize(
    ("placement", "message"),
    [(at(0, 4), "tp is 4, and the bundle can be split over 1, 2 ranks"), (at(4, 2), "rank is 4, .* 0 to 3")],
)
def test_worlds_that_a_bundle_excludes(placement: Placement, message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        bind_world(graph_of(**WORLD), placement)
    assert error.value.code == "engine-option-invalid"


@pytest.mark.parametrize("change", [{"first": "(rank * 24)"}, {"heads": "floordiv(4, rank)"}])
def test_what_makes_no_sense_with_a_world_is_refused(change: dict[str, str]) -> None:
    graph = parse_graph(SHARDED.format(**{**WORLD, **change}))
    with pytest.raises(BundleError) as error:
        bind_world(graph, at(1 if "first" in change else 0, 2))
    assert error.value.code == "graph-invalid"


def test_every_expression_of_the_schema_is_found() -> None:
    """Expressions stand in fields of the type `Expr`, or in tuples of it: in no other way."""
    structs = [each for each in vars(schema).values() if isinstance(each, type) and issubclass(each, msgspec.Struct)]
    kinds = {kind for struct in structs for kind in typing.get_type_hints(struct, vars(schema)).values()}
    holding = {kind for kind in kinds if Apply in _parts(kind)}

    assert holding == {Expr, tuple[Expr, ...]}


def _parts(kind: typing.Any) -> set[typing.Any]:
    return {kind}.union(*(_parts(part) for part in typing.get_args(kind)))


def test_a_rank_has_its_place() -> None:
    assert place("cpu").world == {"rank": 0, "tp": 1, "ep": 1}
    assert place("cpu", rank=3, tp=4, ep=2).world == {"rank": 3, "tp": 4, "ep": 2}


@pytest.mark.parametrize(
    ("world", "message"),
    [
        ({"rank": 1}, "rank is 1, expected 0 to 0"),
        ({"rank": -1, "tp": 2}, "rank is -1, expected 0 to 1"),
        ({"tp": 0}, "tp is 0, expected an integer of 1 to 1024"),
        ({"tp": 2048}, "tp is 2048, expected"),
        ({"ep": True}, "ep is True, expected"),
        ({"tp": 6, "ep": 4}, "ep is 4, and tp is 6: .*\n  fix: give an ep that divides tp\n"),
    ],
)
def test_worlds_that_are_none(world: dict[str, typing.Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        place("cpu", **world)
    assert error.value.code == "engine-option-invalid"


def test_ranks_share_no_gpu() -> None:
    with pytest.raises(RequestError, match="device is 'cuda:1', and each rank takes a GPU of its own") as error:
        place("cuda:1", tp=2)
    assert error.value.code == "engine-option-invalid"


@pytest.mark.parametrize(
    ("tp", "ep", "message"), [(3, 1, "split over 1, 2, 4 ranks"), (4, 4, "into 1, 2 parts"), (4, 3, "into 1, 2 parts")]
)
def test_worlds_that_a_bundle_is_not_split_for(tp: int, ep: int, message: str) -> None:
    plan = schema.ShardPlan((schema.World(1), schema.World(2, (1, 2)), schema.World(4, (1, 2))))
    graph = msgspec.structs.replace(graph_of(**WORLD), shards=plan)
    for refuse in (check_world, lambda tp, ep, graph: bind_world(graph, at(0, tp, ep))):
        with pytest.raises(RequestError, match=message) as error:
            refuse(tp, ep, graph)
        assert error.value.code == "engine-option-invalid"
    check_world(4, 2, graph)


def test_what_is_printed_as_valid_can_be_loaded() -> None:
    """And nothing else: the ranks that a refusal names, and the parts that one names for each of these."""
    graph = parse_graph(SHARDED.format(**WORLD))
    with pytest.raises(RequestError) as error:
        bind_world(graph, at(0, 64))
    named = [int(count) for count in re.findall(r"\d+", error.value.message.partition("split over")[2])]

    assert named == [1, 2]
    for tp in range(1, 9):
        for ep in range(1, tp + 1):
            if tp in named and ep == 1:
                verifier.check(bind_world(graph, at(tp - 1, tp, ep)))
            else:
                with pytest.raises(RequestError):
                    bind_world(graph, at(tp - 1, tp, ep))
