"""Graphs on one of several ranks with sequences of their own: which nodes see all ranks' tokens, and what moves."""

from __future__ import annotations

import re

import pytest
from graph_text import parse_graph

from precast.ir.graph.data_parallel import refusal
from precast.ir.graph.schema import Graph
from precast.ir.graph.text import format_graph
from precast.ir.graph.world import bound
from precast.ir.verify import verifier

GRAPH = """
symbols {{ B: 1..  ep: 1..1  L: 0..  P: 0..  R: 0..  rank: 0..3  T: 1..  tp: 1..4 }}
inputs {{
  %input_ids: int64[1, T]
  %a: int32[L]
  %b: int32[(1 + B)]
  %c: int32[B]
  %d: int64[T]
  %logit_rows: int64[R]
}}
params {{
  %k: float32[(8 * floordiv(4, tp)), 8] = slice(read("k", [32, 8], float32), dim=0, start=(8 * floordiv(4, tp) * rank), length=(8 * floordiv(4, tp)))
  %o: float32[8, (8 * floordiv(4, tp))] = slice(read("o", [8, 32], float32), dim=1, start=(8 * floordiv(4, tp) * rank), length=(8 * floordiv(4, tp)))
  %up: float32[(8 * floordiv(4, tp)), 8] = slice(read("up", [32, 8], float32), dim=0, start=(8 * floordiv(4, tp) * rank), length=(8 * floordiv(4, tp)))
  %down: float32[8, (8 * floordiv(4, tp))] = slice(read("down", [8, 32], float32), dim=1, start=(8 * floordiv(4, tp) * rank), length=(8 * floordiv(4, tp)))
  %bias: float32[8] = read("bias", [8], float32)
  %embed: float32[48, 8] = read("embed", [48, 8], float32)
}}
pool kv(pages=P, pages_per_slab=1)
group full(pool=kv, spec=paged(num_kv_heads=floordiv(4, tp), head_size=8, value_size=8, dtype=float32, page_size=4, window=none), page_indices=%a, page_indptr=%b, page_start=%c, slot_mapping=%d) {{
  slot l0(%kc: float32[P, 4, floordiv(4, tp), 8], %vc: float32[P, 4, floordiv(4, tp), 8])
}}
shards {{
  world(tp=1, ep=[1])
  world(tp=2, ep=[1])
  world(tp=4, ep=[1])
}}
block layer {{
  inputs {{
    %x: float32[1, T, 8]
    %d: int64[T]
  }}
  params {{
    %k: float32[(8 * floordiv(4, tp)), 8]
    %o: float32[8, (8 * floordiv(4, tp))]
    %up: float32[(8 * floordiv(4, tp)), 8]
    %down: float32[8, (8 * floordiv(4, tp))]
    %bias: float32[8]
  }}
  caches {{
    %kc: float32[P, 4, floordiv(4, tp), 8]
    %vc: float32[P, 4, floordiv(4, tp), 8]
  }}
  {block}
}}
main {{
  %x: float32[1, T, 8] = precast.embedding(ids=%input_ids, weight=%embed)
  %y: float32[1, T, 8] = call layer(x=%x, d=%d, k=%k, o=%o, up=%up, down=%down, bias=%bias, kc=%kc, vc=%vc)
  %last: float32[1, R, 8] = precast.gather_rows(x=%y, rows=%logit_rows)
  %logits: float32[1, R, 48] = aten.linear.default(input=%last, weight=%embed)
  return logits=%logits
}}
"""  # noqa: E501
KEYS = """
  %flat: float32[1, T, (8 * floordiv(4, tp))] = aten.linear.default(input=%x, weight=%k)
  %heads: float32[1, T, floordiv(4, tp), 8] = aten.reshape.default(self=%flat, shape=[1, T, floordiv(4, tp), 8])
  precast.write_kv(k=%heads, v=%heads, k_cache=%kc, v_cache=%vc, slot_mapping=%d)
  %seen: float32[1, T, 8] = aten.linear.default(input=%flat, weight=%o)
"""
CHANNELS = """
  %h: float32[1, T, (8 * floordiv(4, tp))] = aten.linear.default(input=%{0}, weight=%up)
  %act: float32[1, T, (8 * floordiv(4, tp))] = aten.silu.default(self=%h)
  %made: float32[1, T, 8] = aten.linear.default(input=%act, weight=%down)
"""
ONE_AFTER_THE_OTHER = f"""
  {KEYS}
  %sum: float32[1, T, 8] = precast.all_reduce(x=%seen, group="tp")
  %mid: float32[1, T, 8] = aten.add.Tensor(self=%x, other=%sum)
  {CHANNELS.format("mid")}
  %sum2: float32[1, T, 8] = precast.all_reduce(x=%made, group="tp")
  %y: float32[1, T, 8] = aten.add.Tensor(self=%mid, other=%sum2)
  return %y
"""
SIDE_BY_SIDE = f"""
  {KEYS}
  {CHANNELS.format("x")}
  %both: float32[1, T, 8] = aten.add.Tensor(self=%seen, other=%made)
  %sum: float32[1, T, 8] = precast.all_reduce(x=%both, group="tp")
  %y: float32[1, T, 8] = aten.add.Tensor(self=%x, other=%sum)
  return %y
"""


def graph_of(block: str, *others: tuple[str, str]) -> Graph:
    """The graph with this block, and with `others`, by what they stand for."""
    text = GRAPH.format(block=block)
    for old, new in others:
        assert old in text
        text = text.replace(old, new)
    graph = parse_graph(text)
    verifier.check(graph)
    return graph


def on_rank(graph: Graph, rank: int = 1, tp: int = 2) -> Graph:
    made = bound(graph, {"rank": rank, "tp": tp, "ep": 1}, dp=tp)
    verifier.check(made)
    return made


def nodes_of(graph: Graph) -> list[str]:
    """The block's nodes as text."""
    lines = format_graph(graph).partition("block layer")[2].partition("return")[0].splitlines()
    return [line.strip() for line in lines if "@1(" in line]


def test_caches_are_for_own_tokens_and_channels_for_those_of_all_ranks() -> None:
    assert nodes_of(on_rank(graph_of(ONE_AFTER_THE_OTHER))) == [
        "%flat: float32[1, T, 32] = aten.linear.default@1(input=%x, weight=%k)",
        "%heads: float32[1, T, 4, 8] = aten.reshape.default@1(self=%flat, shape=[1, T, 4, 8])",
        "precast.write_kv@1(k=%heads, v=%heads, k_cache=%kc, v_cache=%vc, slot_mapping=%d)",
        "%seen: float32[1, T, 8] = aten.linear.default@1(input=%flat, weight=%o)",
        "%mid: float32[1, T, 8] = aten.add.Tensor@1(self=%x, other=%seen)",
        '%mid_of_all_ranks: float32[1, (2 * T), 8] = precast.all_gather@1(x=%mid, dim=1, group="tp", size=2)',
        "%h: float32[1, (2 * T), 16] = aten.linear.default@1(input=%mid_of_all_ranks, weight=%up)",
        "%act: float32[1, (2 * T), 16] = aten.silu.default@1(self=%h)",
        "%made: float32[1, (2 * T), 8] = aten.linear.default@1(input=%act, weight=%down)",
        '%sum2: float32[1, T, 8] = precast.reduce_scatter@1(x=%made, dim=1, group="tp", size=2)',
        "%y: float32[1, T, 8] = aten.add.Tensor@1(self=%mid, other=%sum2)",
    ]


def test_a_sum_of_both_is_parted() -> None:
    made = nodes_of(on_rank(graph_of(SIDE_BY_SIDE)))

    assert made[-3:] == [
        '%made_own: float32[1, T, 8] = precast.reduce_scatter@1(x=%made, dim=1, group="tp", size=2)',
        "%both: float32[1, T, 8] = aten.add.Tensor@1(self=%seen, other=%made_own)",
        "%y: float32[1, T, 8] = aten.add.Tensor@1(self=%x, other=%both)",
    ]


def test_params_caches_and_logits_fit() -> None:
    made = on_rank(graph_of(ONE_AFTER_THE_OTHER))

    assert {param.name: param.type.shape for param in made.params} == {
        "k": (32, 8), "o": (8, 32), "up": (16, 8), "down": (8, 16), "bias": (8,), "embed": (48, 8),
    }  # fmt: skip
    text = format_graph(made)
    assert '%up: float32[16, 8] = slice(read("up", [32, 8], float32), dim=0, start=16, length=16)' in text
    assert '%k: float32[32, 8] = read("k", [32, 8], float32)' in text
    assert "num_kv_heads=4" in text
    assert "%logits_of_all_ranks: float32[1, (2 * R), 48]" in text
    assert made.outputs == {"logits": "logits_of_all_ranks"}


BIAS_ONCE = ONE_AFTER_THE_OTHER.replace(
    "weight=%o)", "weight=%o, bias=%bias_once)"
).replace(
    "%seen:", "%bias_once: float32[8] = aten.mul.Tensor(self=%bias, other=(1 + (-1 * min(1, rank))))\n  %seen:"
)  # fmt: skip


def test_a_bias_that_one_rank_adds_is_added_by_all_where_nothing_is_summed() -> None:
    made = nodes_of(on_rank(graph_of(BIAS_ONCE)))

    assert "%seen: float32[1, T, 8] = aten.linear.default@1(input=%flat, weight=%o, bias=%bias)" in made
    assert not any("bias_once" in line for line in made)


NORMED = ONE_AFTER_THE_OTHER.replace("%mid: float32[1, T, 8] = aten.add.Tensor(self=%x, other=%sum)", "").replace(
    '%sum: float32[1, T, 8] = precast.all_reduce(x=%seen, group="tp")',
    "%mid: float32[1, T, 8], %kept: float32[1, T, 8] = precast.all_reduce_residual_rms_norm(x=%seen, residual=%x, "
    'weight=%bias, eps=1e-05, cast_before_scale=true, group="tp")',
)


def test_a_sum_that_is_normed_at_once_is_a_norm_where_nothing_is_summed() -> None:
    made = nodes_of(on_rank(graph_of(NORMED)))

    assert (
        "%mid: float32[1, T, 8], %kept: float32[1, T, 8] = precast.residual_rms_norm@1(x=%seen, residual=%x, "
        "weight=%bias, eps=1e-05, cast_before_scale=true)"
    ) in made


TWO_SHAPES = ONE_AFTER_THE_OTHER.replace("input=%mid, weight=%up", "input=%mid2, weight=%up").replace(
    "%h:", "%mid2: float32[1, T, 8] = aten.reshape.default(self=%mid, shape=[1, T, 8])\n  %h:"
)


def test_a_value_under_two_shapes_goes_once_from_rank_to_rank() -> None:
    made = nodes_of(on_rank(graph_of(TWO_SHAPES)))

    assert [line for line in made if "all_gather" in line] == [
        '%mid_of_all_ranks: float32[1, (2 * T), 8] = precast.all_gather@1(x=%mid, dim=1, group="tp", size=2)'
    ]
    view = "aten.reshape.default@1(self=%mid_of_all_ranks, shape=[1, (2 * T), 8])"
    assert f"%mid2_of_all_ranks: float32[1, (2 * T), 8] = {view}" in made


CUT = ONE_AFTER_THE_OTHER.replace("%act:", "%whole: float32[1, T, (8 * tp * floordiv(4, tp))] = precast.all_gather("
    'x=%h, dim=2, group="tp", size=tp)\n  %some: float32[1, T, 8] = aten.slice.Tensor(self=%whole, dim=2, start=0, '
    "end=8)\n  %act:").replace("self=%mid, other=%sum2", "self=%some, other=%sum2")  # fmt: skip


def test_of_what_all_ranks_have_of_all_tokens_a_rank_cuts_out_its_own() -> None:
    made = nodes_of(on_rank(graph_of(CUT), rank=3, tp=4))

    assert made[-2:] == [
        "%y: float32[1, (4 * T), 8] = aten.add.Tensor@1(self=%some, other=%sum2_of_all_ranks)",
        "%y_own: float32[1, T, 8] = aten.slice.Tensor@1(self=%y, dim=1, start=(3 * T), end=(4 * T))",
    ]


HEAD_IN_PARTS = (
    ('%embed: float32[48, 8] = read("embed", [48, 8], float32)',
     '%embed: float32[48, 8] = read("embed", [48, 8], float32)\n  %head: float32[floordiv(48, tp), 8] = slice('
     'read("head", [48, 8], float32), dim=0, start=(floordiv(48, tp) * rank), length=floordiv(48, tp))'),
    ("%last: float32[1, R, 8] = precast.gather_rows(x=%y, rows=%logit_rows)",
     "%all: float32[1, T, floordiv(48, tp)] = aten.linear.default(input=%y, weight=%head)"),
    ("%logits: float32[1, R, 48] = aten.linear.default(input=%last, weight=%embed)",
     "%last: float32[1, R, floordiv(48, tp)] = precast.gather_rows(x=%all, rows=%logit_rows)\n"
     '  %logits: float32[1, R, (tp * floordiv(48, tp))] = precast.all_gather(x=%last, dim=2, group="tp", size=tp)'),
)  # fmt: skip


def test_what_looks_across_tokens_sees_own_ones_without_a_cache_too() -> None:
    made = on_rank(graph_of(ONE_AFTER_THE_OTHER, *HEAD_IN_PARTS))

    main = format_graph(made).partition("\nmain {")[2]
    assert "%all: float32[1, T, 48] = aten.linear.default@1(input=%y, weight=%head)" in main
    assert "%last: float32[1, R, 48] = precast.gather_rows@1(x=%all, rows=%logit_rows)" in main


PAIRS = f"""
  {KEYS}
  %pairs: float32[1, (2 * T), 4] = aten.reshape.default(self=%x, shape=[1, (2 * T), 4])
  %left: float32[(8 * floordiv(4, tp)), 4] = aten.slice.Tensor(self=%up, dim=1, start=0, end=4)
  %h: float32[1, (2 * T), (8 * floordiv(4, tp))] = aten.linear.default(input=%pairs, weight=%left)
  %made: float32[1, (2 * T), 8] = aten.linear.default(input=%h, weight=%down)
  %sum: float32[1, (2 * T), 8] = precast.all_reduce(x=%made, group="tp")
  %flat_sum: float32[1, T, 16] = aten.reshape.default(self=%sum, shape=[1, T, 16])
  %half: float32[1, T, 8] = aten.slice.Tensor(self=%flat_sum, dim=2, start=0, end=8)
  %all: float32[1, T, 8] = precast.all_reduce(x=%seen, group="tp")
  %y: float32[1, T, 8] = aten.add.Tensor(self=%half, other=%all)
  return %y
"""
NO_CHANNELS = f'{KEYS}\n  %sum: float32[1, T, 8] = precast.all_reduce(x=%seen, group="tp")\n  return %sum'


@pytest.mark.parametrize(
    ("block", "dp", "tp", "found"),
    [
        (ONE_AFTER_THE_OTHER, 1, 2, None),
        (ONE_AFTER_THE_OTHER, 4, 4, None),
        (ONE_AFTER_THE_OTHER, 2, 4, "dp is 2, and tp is 4: either each of the ranks has sequences of its own, or none "
         "has; give 4, or 1"),
        (ONE_AFTER_THE_OTHER, 2, 1, "dp is 2, and tp is 1: .*; give 1$"),
        (NO_CHANNELS, 2, 2, "dp is 2, and nothing of this model's layers would stay split"),
        (PAIRS, 2, 2, r"%pairs \[1, \(2 \* T\), 4\] would go from rank to rank, and none of its sizes"),
    ],
)  # fmt: skip
def test_refused_with_the_reason(block: str, dp: int, tp: int, found: str | None) -> None:
    made = refusal(graph_of(block), dp, tp)

    assert made is None if found is None else re.search(found, made or "")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ((", up=%up,", ", up=%k,"), "k is needed both whole and in parts; give 1$"),
        (('%up: float32[(8 * floordiv(4, tp)), 8] = slice(read("up", [32, 8], float32), dim=0, '
          "start=(8 * floordiv(4, tp) * rank), length=(8 * floordiv(4, tp)))",
          "%up: float32[(8 * floordiv(4, tp)), 8] = tie(%k)"), "up is tied to k, and one of them would be whole"),
    ],
)  # fmt: skip
def test_params_that_would_be_whole_and_split_are_refused(change: tuple[str, str], found: str) -> None:
    assert re.search(found, refusal(graph_of(ONE_AFTER_THE_OTHER, change), 2, 2) or "")
