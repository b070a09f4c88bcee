"""Pipelines: the largest stage has as few bytes as can be, and what shares a cache stays together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import pytest
from graph_text import parse_graph

from precast.builder.shard.pipelines import pipelines
from precast.ir.graph.schema import Graph, Pipeline, ShardPlan
from precast.ir.verify.verifier import verify


def model(sizes: Sequence[int], *, embed: int = 1, head: int = 1, tied: bool = False, shared: str = "") -> Graph:
    """Layers with params of so many rows of 8 numbers; `shared`: the layers that read the cache of layer 0."""
    params = [f'%w{i}: float32[{size}, 8] = read("w{i}", [{size}, 8], float32)' for i, size in enumerate(sizes)]
    params.append(f'%embed: float32[{embed}, 8] = read("embed", [{embed}, 8], float32)')
    params.append(
        f"%head: float32[{embed}, 8] = tie(%embed)"
        if tied
        else f'%head: float32[{head}, 8] = read("head", [{head}, 8], float32)'
    )
    blocks = [
        f"block layer{size} {{ inputs {{ %x: float32[1, T, 8] %slots: int64[T] }} params {{ %w: float32[{size}, 8] }}"
        " caches { %k: float32[P, 16, 1, 8] %v: float32[P, 16, 1, 8] }"
        f" %h = aten.linear.default(input=%x, weight=%w) %y = aten.silu.default(self=%x)"
        " %o = aten.reshape.default(self=%y, shape=[1, T, 1, 8])"
        " precast.write_kv(k=%o, v=%o, k_cache=%k, v_cache=%v, slot_mapping=%slots) return %y }"
        for size in sorted(set(sizes))
    ]
    slot = [0 if str(i) in shared else i for i in range(len(sizes))]
    calls = [
        f"%x{i + 1}: float32[1, T, 8] = call layer{size}("
        f"x=%x{i}, slots=%slots, w=%w{i}, k=%l{slot[i]}.k, v=%l{slot[i]}.v)"
        for i, size in enumerate(sizes)
    ]
    slots = [f"slot l{i}(%l{i}.k: float32[P, 16, 1, 8], %l{i}.v: float32[P, 16, 1, 8])" for i in sorted(set(slot))]
    return parse_graph(f"""
    symbols {{ T: 1.. B: 1.. N: 0.. P: 1.. }}
    inputs {{
      %input_ids: int64[1, T] %indices: int32[N] %indptr: int32[(B + 1)] %start: int32[B] %slots: int64[T]
    }}
    params {{ {" ".join(params)} }}
    pool kv(pages=P)
    group full(
      pool=kv, spec=paged(num_kv_heads=1, head_size=8, value_size=8, dtype=float32, page_size=16, window=none),
      page_indices=%indices, page_indptr=%indptr, page_start=%start, slot_mapping=%slots
    ) {{ {" ".join(slots)} }}
    {" ".join(blocks)}
    main {{
      %x0 = precast.embedding(ids=%input_ids, weight=%embed)
      {" ".join(calls)}
      %logits = aten.linear.default(input=%x{len(sizes)}, weight=%head)
      return logits=%logits
    }}
    """)


def layers(graph: Graph) -> list[tuple[int, ...]]:
    return [each.layers for each in pipelines(graph)]


def test_equal_layers_are_divided_evenly() -> None:
    assert layers(model([100] * 6)) == [(3, 3), (2, 2, 2), (1, 2, 2, 1), (1, 1, 1, 2, 1), (1, 1, 1, 1, 1, 1)]


def test_the_embedding_and_the_head_count() -> None:
    assert layers(model([100] * 6, embed=200))[0] == (2, 4)
    assert layers(model([100] * 6, head=200))[0] == (4, 2)
    assert layers(model([100] * 6, embed=200, tied=True))[0] == (3, 3)  # both stages hold it


def test_a_large_layer_has_a_stage_for_itself_and_small_ones_share() -> None:
    assert layers(model([10, 10, 10, 300, 10]))[:2] == [(3, 2), (3, 1, 1)]


@pytest.mark.parametrize("sizes", [[7, 3, 9, 1, 1, 8], [50, 1, 1, 1, 1], [1, 2, 3, 4, 5, 6, 7]])
def test_no_other_way_has_a_smaller_largest_stage(sizes: list[int]) -> None:
    def largest(bounds: Sequence[int]) -> int:
        return max(sum(sizes[a:b]) + (a == 0) + (b == len(sizes)) for a, b in itertools.pairwise(bounds))

    for found in layers(model(sizes)):
        ways = itertools.combinations(range(1, len(sizes)), len(found) - 1)
        least = min(largest((0, *cuts, len(sizes))) for cuts in ways)
        assert largest(tuple(itertools.accumulate(found, initial=0))) == least


def test_layers_that_share_a_cache_stay_on_one_stage() -> None:
    graph = model([10] * 6, shared="023")

    assert layers(graph) == [(4, 2), (4, 1, 1)]
    assert layers(model([10] * 3, shared="02")) == []


def test_a_plan_that_parts_what_shares_a_cache_is_no_graph() -> None:
    graph = model([10] * 6, shared="023")

    def faults(*plan: Pipeline) -> list[str]:
        found = verify(msgspec.structs.replace(graph, shards=ShardPlan(pipelines=plan)))
        assert {each.rule for each in found} <= {"IR064"}
        return [each.message for each in found]

    assert faults(*pipelines(graph)) == []
    assert faults(Pipeline((3, 3))) == ["the slot l0 would be in two stages"]
    assert faults(Pipeline((4, 1))) == ["expected two stages or more, each of a call or more, and 6 calls in all"]
    assert faults(Pipeline((6, 0))) == faults(Pipeline((6,))) == faults(Pipeline((4, 1)))
    assert faults(Pipeline((4, 2)), Pipeline((5, 1))) == ["is declared twice"]
    assert faults(Pipeline((1,) * 65)) == ["expected at most 64 stages"]
