"""States in the language: their groups in text and in the verifier, and the ops that keep them."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import pytest
from graph_text import parse_graph

from precast.ir.graph.schema import Const, Graph, Node, StateSpec
from precast.ir.graph.text import format_graph
from precast.ir.verify.verifier import verify

TEXT = """\
symbols {
  B: 1..
  P_conv: 0..
  P_scan: 0..
  T: 1..
}
inputs {
  %cu_seqlens: int32[(1 + B)]
  %conv_ids: int32[B]
  %kv_lens: int32[B]
  %scan_ids: int32[B]
  %a: float32[6]
  %b: float32[1, T, 2, 5]
  %dt: float32[1, T, 6]
  %x: float32[1, T, 6]
  %y: float32[1, T, 6, 4]
}
params {
  %w: float32[6, 4] = read("w", [6, 4], float32)
}
pool convs(pages=P_conv)
pool scans(pages=P_scan)
group conv_6x3(pool=convs, spec=conv(shape=[6, 3], dtype=float32), slot_ids=%conv_ids) {
  slot layers.0(%layers.0.conv: float32[P_conv, 6, 3])
  slot layers.1(%layers.1.conv: float32[P_conv, 6, 3])
}
group scan(pool=scans, spec=state(shape=[6, 4, 5], dtype=float32), slot_ids=%scan_ids) {
  slot layers.0.scan(%layers.0.state: float32[P_scan, 6, 4, 5])
}
block conv {
  inputs {
    %x: float32[1, T, 6]
    %bounds: int32[(1 + B)]
    %ids: int32[B]
    %lens: int32[B]
  }
  params {
    %w: float32[6, 4]
  }
  caches {
    %state: float32[P_conv, 6, 3]
  }
  %z: float32[1, T, 6] = precast.stateful_causal_conv@1(x=%x, weight=%w, bias=none, state=%state, slots=%ids, cu_seqlens=%bounds, kv_lens=%lens, activation="silu")
  return %z
}
main {
  %h: float32[1, T, 6] = call conv(x=%x, bounds=%cu_seqlens, ids=%conv_ids, lens=%kv_lens, w=%w, state=%layers.0.conv)
  %g: float32[1, T, 6] = precast.stateful_causal_conv@1(x=%h, weight=%w, bias=none, state=%layers.1.conv, slots=%conv_ids, cu_seqlens=%cu_seqlens, kv_lens=%kv_lens)
  %s: float32[1, T, 6, 4] = precast.stateful_state_space_scan@1(x=%y, dt=%dt, a=%a, b=%b, c=%b, d=none, dt_bias=none, state=%layers.0.state, slots=%scan_ids, cu_seqlens=%cu_seqlens, kv_lens=%kv_lens, softplus=true, dt_min=0.0, dt_max=inf)
  return conv=%g, scan=%s
}
"""  # noqa: E501


class Case(NamedTuple):
    rule: str
    message: str
    edits: tuple[tuple[str, str], ...]
    also: tuple[str, ...] = ()


def graph(*edits: tuple[str, str]) -> Graph:
    text = TEXT
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return parse_graph(text)


# --- text --------------------------------------------------------------------------------------------------------


def test_the_text_form_is_read_back() -> None:
    source = graph()

    conv, scan = source.caches.states
    assert (conv.spec, conv.slot_ids) == (StateSpec("conv", (6, 3), "float32"), "conv_ids")
    assert [slot.name for slot in conv.slots] == ["layers.0", "layers.1"]
    assert scan.spec == StateSpec("state", (6, 4, 5), "float32")
    assert source.caches.groups == ()
    assert format_graph(source) == TEXT


def test_a_shape_may_depend_on_symbols() -> None:
    source = graph(("symbols {", "symbols {\n  tp: 1..8"), ("shape=[6, 3]", "shape=[floordiv(6, tp), 3]"))

    assert parse_graph(format_graph(source)) == source
    assert "spec=conv(shape=[floordiv(6, tp), 3], dtype=float32)" in format_graph(source)


@pytest.mark.parametrize(("written", "value"), [("inf", math.inf), ("-inf", -math.inf), ("0.1", 0.1)])
def test_limits_of_a_scan_may_be_infinite(written: str, value: float) -> None:
    low = "-inf" if written == "-inf" else "0.0"
    source = graph(("dt_max=inf", f"dt_max={written}"), ("dt_min=0.0", f"dt_min={low}"))

    scan = source.main[-1]
    assert isinstance(scan, Node)
    assert scan.args["dt_max"] == Const(value)
    assert parse_graph(format_graph(source)) == source
    assert verify(source) == ()


# --- rules -------------------------------------------------------------------------------------------------------


def test_a_graph_with_states_is_valid() -> None:
    assert verify(graph()) == ()


ONE_POOL = (
    ("pool scans(pages=P_scan)\n", ""),
    ("pool=scans", "pool=convs"),
    ("P_scan: 0..", "Q: 0.."),
    ("[P_scan", "[P_conv"),
    ("[6, 4, 5]", "[6, 3]"),
    ("P_conv, 6, 4, 5", "P_conv, 6, 3"),
    (
        "%s: float32[1, T, 6, 4] = precast.stateful_state_space_scan@1(x=%y, dt=%dt, a=%a, b=%b, c=%b, d=none, "
        "dt_bias=none, state=%layers.0.state, slots=%scan_ids, cu_seqlens=%cu_seqlens, "
        "kv_lens=%kv_lens, softplus=true, "
        "dt_min=0.0, dt_max=inf)",
        "%s: float32[1, T, 6] = precast.stateful_causal_conv@1(x=%x, weight=%w, bias=none, state=%layers.0.state, "
        "slots=%scan_ids, cu_seqlens=%cu_seqlens, kv_lens=%kv_lens)",
    ),
)


@pytest.mark.parametrize(
    "edits",
    [
        pytest.param(
            (("slot layers.0.scan(", "slot scan("), ("pool scans(", "pool scan("), ("pool=scans", "pool=scan")),
            id="IR040: a pool, a group and a slot of one name",
        ),
        pytest.param(ONE_POOL, id="IR041, IR045: two groups of one geometry share a pool"),
        pytest.param((("P_scan: 0..", "P_scan: 0..64"),), id="IR042: a number of states with a limit"),
        pytest.param(
            (
                ("slot_ids=%conv_ids", "slot_ids=%ids2"),
                ("%conv_ids: int32[B]", "%ids2: int32[B]"),
                ("ids=%conv_ids", "ids=%ids2"),
                ("slots=%conv_ids", "slots=%ids2"),
            ),
            id="IR046, IR047: another name",
        ),
    ],
)
def test_rules_let_this_pass(edits: tuple[tuple[str, str], ...]) -> None:
    assert verify(graph(*edits)) == ()


SCAN_CALL = "slots=%scan_ids"


@pytest.mark.parametrize(
    "case",
    [
        Case("IR040", "group scan: is declared twice", (("group conv_6x3(", "group scan("),)),
        Case("IR040", "slot layers.0: is declared twice", (("slot layers.0.scan(", "slot layers.0("),)),
        Case(
            "IR041",
            "group scan: there is no pool lost",
            (("pool=scans", "pool=lost"), ("pool scans(pages=P_scan)\n", "")),
        ),
        Case(
            "IR041",
            "pool spare: no group uses it",
            (("pool scans(", "pool spare(pages=Q)\npool scans("), ("symbols {", "symbols {\n  Q: 0..")),
            (),
        ),
        Case(
            "IR041",
            "group more: expected at least one slot",
            (
                (
                    "block conv {",
                    "group more(pool=scans, spec=state(shape=[6, 4, 5], dtype=float32), slot_ids=%more) {\n}\n"
                    "block conv {",
                ),
                ("%kv_lens: int32[B]\n  %scan", "%kv_lens: int32[B]\n  %more: int32[B]\n  %scan"),
            ),
        ),
        Case(
            "IR042",
            "its pages are counted by P_lost, which is no declared symbol",
            (("pool scans(pages=P_scan)", "pool scans(pages=P_lost)"), ("[P_scan", "[P_lost")),
            ("IR011",),
        ),
        Case("IR042", "counts the pages of two pools", (("pages=P_scan", "pages=P_conv"), ("[P_scan", "[P_conv"))),
        Case(
            "IR042",
            "which is a size of an input",
            (("%scan_ids: int32[B]", "%scan_ids: int32[P_scan]"),),
            ("IR022", "IR046"),
        ),
        Case(
            "IR043",
            "group conv_6x3: shape: expected at least 1, found 0",
            (("shape=[6, 3]", "shape=[6, 0]"),),
            ("IR044",),
        ),
        Case(
            "IR044",
            r"slot layers.1: expected tensors float32\[P_conv, 6, 3\] by the spec of its group, "
            r"found float32\[P_conv, 6, 2\]",
            (("%layers.1.conv: float32[P_conv, 6, 3]", "%layers.1.conv: float32[P_conv, 6, 2]"),),
            ("IR022",),
        ),
        Case(
            "IR044",
            "slot layers.0.scan: expected",
            (("shape=[6, 4, 5], dtype=float32", "shape=[6, 4, 5], dtype=float16"),),
        ),
        Case(
            "IR044",
            "slot layers.1: expected",
            (
                (
                    "%layers.1.conv: float32[P_conv, 6, 3])",
                    "%layers.1.conv: float32[P_conv, 6, 3], %more: float32[P_conv, 6, 3])",
                ),
            ),
        ),
        Case(
            "IR045",
            "group scan: its pages have another geometry than those of conv_6x3 in the same pool",
            (("pool=scans", "pool=convs"), ("pool scans(pages=P_scan)\n", ""), ("[P_scan", "[P_conv")),
        ),
        Case(
            "IR046",
            "group scan: %lost is no input of the graph",
            (("slot_ids=%scan_ids", "slot_ids=%lost"),),
            ("IR047",),
        ),
        Case(
            "IR046",
            r"group scan: %scan_ids: expected int32\[B\], found int64\[B\]",
            (("%scan_ids: int32[B]", "%scan_ids: int64[B]"),),
            ("IR022",),
        ),
        Case(
            "IR046",
            r"%scan_ids: expected int32\[B\], found int32\[B, 1\]",
            (("%scan_ids: int32[B]", "%scan_ids: int32[B, 1]"),),
            ("IR022",),
        ),
        Case(
            "IR046",
            "conv_ids: is the metadata of two groups",
            (("slot_ids=%scan_ids", "slot_ids=%conv_ids"), (SCAN_CALL, "slots=%conv_ids")),
        ),
        Case(
            "IR047",
            r"main\[2\] precast.stateful_state_space_scan: slots: expected %scan_ids of slot layers.0.scan, "
            "group scan, found %conv_ids",
            ((SCAN_CALL, "slots=%conv_ids"),),
        ),
        Case(
            "IR047",
            r"main\[0\] call conv, block conv\[0\] precast.stateful_causal_conv: slots: expected %conv_ids",
            (("ids=%conv_ids, lens", "ids=%scan_ids, lens"),),
        ),
        Case(
            "IR047",
            "state: expected a tensor of a state slot",
            (
                ("  %g: ", "  %copy: float32[P_conv, 6, 3] = aten.neg.default@1(self=%layers.1.conv)\n  %g: "),
                ("state=%layers.1.conv", "state=%copy"),
            ),
            ("IR023",),
        ),
    ],
    ids=lambda case: f"{case.rule}-{case.message[:40]}",
)
def test_rules_refuse_this(case: Case) -> None:
    found = verify(graph(*case.edits))

    assert {violation.rule for violation in found} == {case.rule, *case.also}
    lines = [f"{item.where}: {item.message}" for item in found if item.rule == case.rule]
    assert any(re.search(case.message, line) for line in lines), lines


PAGES = """\
pool pages(pages=P)
group full(pool=pages, spec=paged(num_kv_heads=1, head_size=3, value_size=3, dtype=float32, page_size=6, window=none), \
page_indices=%i, page_indptr=%p, page_start=%st, slot_mapping=%m) {
  slot layers.2(%layers.2.k: float32[P, 6, 1, 3], %layers.2.v: float32[P, 6, 1, 3])
}
"""


def with_pages(*steps: str) -> Graph:
    """The graph with a group of pages, and these steps before the second conv."""
    return graph(
        ("symbols {", "symbols {\n  N: 0..\n  P: 0.."),
        (
            "inputs {\n  %cu_seqlens",
            "inputs {\n  %i: int32[N]\n  %p: int32[(1 + B)]\n  %st: int32[B]\n  %m: int64[T]\n  %cu_seqlens",
        ),
        ("block conv {", PAGES + "block conv {"),
        ("  %g: ", "".join(f"  {step}\n" for step in steps) + "  %g: "),
        ("  %x: float32[1, T, 6]\n  %y", "  %x: float32[1, T, 6]\n  %k3: float32[1, T, 3]\n  %y"),
    )


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            "precast.write_kv@1(k=%key, v=%key, k_cache=%layers.0.conv, v_cache=%layers.0.conv, slot_mapping=%m)",
            "k_cache: expected a tensor of a cache slot",
        ),
        (
            "%no: float32[1, T, 6] = precast.stateful_causal_conv@1(x=%x, weight=%w, bias=none, state=%layers.2.k, "
            "slots=%conv_ids, cu_seqlens=%cu_seqlens, kv_lens=%kv_lens)",
            "state: expected a tensor of a state slot",
        ),
    ],
)
def test_pages_are_no_states(step: str, message: str) -> None:
    key = "%key: float32[1, T, 1, 3] = aten.reshape.default@1(self=%k3, shape=[1, T, 1, 3])"

    assert verify(with_pages(key)) == ()
    assert [item.message for item in verify(with_pages(key, step)) if item.rule == "IR047"] == [message]
