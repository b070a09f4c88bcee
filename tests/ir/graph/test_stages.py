"""Stages: what each has of a graph, what it is sent, and which numbers of stages are refused."""

from __future__ import annotations

import msgspec
import pytest
from graph_text import parse_graph

from precast.ir.graph.schema import Graph, Pipeline, Read, ShardPlan, Tie, World
from precast.ir.graph.stages import bounds_of, refusal, slot_spans, stage_graph, stages_of
from precast.ir.graph.text import format_step
from precast.ir.verify.verifier import verify

THREE_LAYERS = """
symbols { T: 1.. B: 1.. N: 0.. R: 1.. P: 1.. }
inputs {
  %input_ids: int64[1, T] %positions: int64[1, T] %cu_seqlens: int32[(B + 1)] %kv_lens: int32[B]
  %logit_rows: int64[R] %indices: int32[N] %indptr: int32[(B + 1)] %start: int32[B] %slots: int64[T]
}
params {
  %embed: float32[32, 8] = read("embed", [32, 8], float32)
  %w0: float32[8, 8] = read("w0", [8, 8], float32)
  %w1: float32[8, 8] = read("w1", [8, 8], float32)
  %w2: float32[8, 8] = read("w2", [8, 8], float32)
  %head: float32[32, 8] = tie(%embed)
}
constants { %freq: float32[2] %far: float32[2] }
pool kv(pages=P)
group full(
  pool=kv, spec=paged(num_kv_heads=1, head_size=4, value_size=4, dtype=float32, page_size=16, window=none),
  page_indices=%indices, page_indptr=%indptr, page_start=%start, slot_mapping=%slots
) {
  slot l0(%l0.k: float32[P, 16, 1, 4], %l0.v: float32[P, 16, 1, 4])
  slot l1(%l1.k: float32[P, 16, 1, 4], %l1.v: float32[P, 16, 1, 4])
  slot l2(%l2.k: float32[P, 16, 1, 4], %l2.v: float32[P, 16, 1, 4])
}
block layer {
  inputs {
    %x: float32[1, T, 8] %cos: float32[1, T, 2] %cu: int32[(B + 1)] %lens: int32[B]
    %indices: int32[N] %indptr: int32[(B + 1)] %start: int32[B] %slots: int64[T]
  }
  params { %w: float32[8, 8] }
  caches { %k: float32[P, 16, 1, 4] %v: float32[P, 16, 1, 4] }
  %h: float32[1, T, 8] = aten.linear.default(input=%x, weight=%w)
  %q: float32[1, T, 2, 4] = aten.reshape.default(self=%h, shape=[1, T, 2, 4])
  %one: float32[1, T, 1, 4] = aten.slice.Tensor(self=%q, dim=2, start=0, end=1)
  precast.write_kv(k=%one, v=%one, k_cache=%k, v_cache=%v, slot_mapping=%slots)
  %o: float32[1, T, 2, 4] = precast.paged_attention(q=%q, k_cache=%k, v_cache=%v, sinks=none, cu_seqlens=%cu,
    kv_lens=%lens, page_indices=%indices, page_indptr=%indptr, page_start=%start, scale=0.5)
  %y: float32[1, T, 8] = aten.reshape.default(self=%o, shape=[1, T, 8])
  return %y
}
main {
  %e: float32[1, T, 8] = precast.embedding(ids=%input_ids, weight=%embed)
  %c, %s = precast.rotary_tables(positions=%positions, inv_freq=%freq, scale=1.0, dtype=float32)
  %a: float32[1, T, 8] = call layer(x=%e, cos=%c, cu=%cu_seqlens, lens=%kv_lens, indices=%indices, indptr=%indptr,
    start=%start, slots=%slots, w=%w0, k=%l0.k, v=%l0.v)
  %b: float32[1, T, 8] = call layer(x=%a, cos=%c, cu=%cu_seqlens, lens=%kv_lens, indices=%indices, indptr=%indptr,
    start=%start, slots=%slots, w=%w1, k=%l1.k, v=%l1.v)
  %between: float32[1, T, 8] = aten.silu.default(self=%b)
  %d: float32[1, T, 8] = call layer(x=%between, cos=%c, cu=%cu_seqlens, lens=%kv_lens, indices=%indices, indptr=%indptr,
    start=%start, slots=%slots, w=%w2, k=%l2.k, v=%l2.v)
  %sum: float32[1, T, 8] = aten.add.Tensor(self=%d, other=%e)
  %rows: float32[1, R, 8] = precast.gather_rows(x=%sum, rows=%logit_rows)
  %logits: float32[1, R, 32] = aten.linear.default(input=%rows, weight=%head)
  return logits=%logits
}
"""

NO_OUTPUTS = {"IR014", "IR041"}
"""What a graph of a bundle must have, and a stage may lack: outputs, and slots in each group of caches."""


@pytest.fixture
def graph() -> Graph:
    made = parse_graph(THREE_LAYERS)
    assert verify(made) == ()
    return made


def heads(graph: Graph) -> list[str]:
    """What each step makes, with its op or block."""
    return [format_step(step).split("(")[0] for step in graph.main]


def test_a_value_that_the_last_stage_needs_passes_through_those_before(graph: Graph) -> None:
    first, second, third = stages_of(graph, (1, 1, 1))

    assert (first.received, first.sent) == ((), ("e", "a"))
    assert (second.received, second.sent) == (("e", "a"), ("e", "b"))
    assert (third.received, third.sent) == (("e", "b"), ())


def test_the_first_stage_has_the_embedding_and_sends(graph: Graph) -> None:
    first = stage_graph(graph, (2, 1), 0)

    assert [param.name for param in first.params] == ["embed", "w0", "w1"]
    assert [slot.name for slot in first.caches.groups[0].slots] == ["l0", "l1"]
    assert first.outputs == {}
    assert [format_step(step) for step in first.main[-2:]] == [
        'precast.send@1(x=%e, group="pp", target=1)', 'precast.send@1(x=%b, group="pp", target=1)',
    ]  # fmt: skip
    assert {violation.rule for violation in verify(first)} <= NO_OUTPUTS


def test_the_last_stage_receives_makes_tables_itself_and_gives_logits(graph: Graph) -> None:
    last = stage_graph(graph, (2, 1), 1)

    assert format_step(last.main[0]) == (
        '%e: float32[1, T, 8] = precast.receive@1(shape=[1, T, 8], dtype=float32, group="pp", source=0)'
    )
    assert [head.partition(" = ")[2] for head in heads(last)] == [
        "precast.receive@1", "precast.receive@1", "precast.rotary_tables@1", "aten.silu.default@1", "call layer",
        "aten.add.Tensor@1", "precast.gather_rows@1", "aten.linear.default@1",
    ]  # fmt: skip
    assert last.outputs == graph.outputs
    assert [value.name for value in last.constants] == ["freq"]
    assert verify(last) == ()


def test_a_param_that_is_tied_to_one_of_another_stage_is_read_there_as_well(graph: Graph) -> None:
    last = stage_graph(graph, (2, 1), 1)

    assert [param.name for param in last.params] == ["w2", "head"]
    assert last.params[1].recipe == Read("embed", (32, 8), "float32")


def test_of_two_params_that_are_tied_to_one_of_another_stage_one_is_read(graph: Graph) -> None:
    more = THREE_LAYERS.replace("tie(%embed)", "tie(%embed) %twin: float32[32, 8] = tie(%embed)")
    more = more.replace("%logits:", "%also = aten.linear.default(input=%rows, weight=%twin) %logits:")

    recipes = [param.recipe for param in stage_graph(parse_graph(more), (2, 1), 1).params]

    assert recipes[1:] == [Read("embed", (32, 8), "float32"), Tie("head")]


def test_all_stages_have_the_inputs_and_the_page_tables_of_all_layers(graph: Graph) -> None:
    slabs = msgspec.structs.replace(
        graph.caches, slab_bytes=12288, pools=(msgspec.structs.replace(graph.caches.pools[0], pages_per_slab=8),)
    )
    graph = msgspec.structs.replace(graph, caches=slabs)

    made = [stage_graph(graph, (2, 1), stage) for stage in (0, 1)]

    assert all(each.inputs == graph.inputs for each in made)
    assert all(each.caches.pools == slabs.pools for each in made)
    assert [each.caches.slab_bytes for each in made] == [8 * 2 * 512, 8 * 512]


def test_a_stage_without_a_cache_has_pages_all_the_same(graph: Graph) -> None:
    text = THREE_LAYERS.replace(
        "call layer(x=%e,", "call plain(w=%w0, x=%e) %unused: float32[1, T, 8] = call layer(x=%e,"
    )
    text = text.replace("main {", "block plain { inputs { %x: float32[1, T, 8] } params { %w: float32[8, 8] }"
                        " %h = aten.linear.default(input=%x, weight=%w) return %h } main {")  # fmt: skip
    parsed = parse_graph(text)
    slabs = msgspec.structs.replace(parsed.caches, slab_bytes=12288)

    first = stage_graph(msgspec.structs.replace(parsed, caches=slabs), (1, 3), 0)

    assert [len(group.slots) for group in first.caches.groups] == [0]
    assert first.caches.slab_bytes == 256
    assert {violation.rule for violation in verify(first)} <= NO_OUTPUTS


def test_layers_that_have_a_slot_in_common(graph: Graph) -> None:
    shared = parse_graph(THREE_LAYERS.replace("k=%l2.k, v=%l2.v", "k=%l1.k, v=%l1.v"))

    assert slot_spans(graph) == {"l0": (0, 0), "l1": (1, 1), "l2": (2, 2)}
    assert slot_spans(shared) == {"l0": (0, 0), "l1": (1, 2)}


def test_nodes_between_layers_go_with_the_next(graph: Graph) -> None:
    assert bounds_of(graph, (2, 1)) == ((0, 4), (4, 9))


PLAN = ShardPlan((World(1),), (), (), (Pipeline((2, 1)),))


@pytest.mark.parametrize(
    ("plan", "pp", "expected"),
    [
        (PLAN, 1, None),
        (PLAN, 2, None),
        (PLAN, 4, "pp is 4, and the graph calls 3 layers or parts of them: each stage takes at least one"),
        (PLAN, 3, "pp is 3, and the layers can be divided into 1, 2 stages: layers that share a cache are not parted"),
        (ShardPlan(), 2, "pp is 2, and the bundle was built without a plan of stages"),
    ],
)
def test_numbers_of_stages_are_refused_with_those_that_fit(plan: ShardPlan, pp: int, expected: str | None) -> None:
    assert refusal(plan, pp, 3) == expected
