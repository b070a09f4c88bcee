"""Caches of entries in the language: in the plan, in text and in the verifier."""

from __future__ import annotations

import re

import pytest
from graph_text import parse_graph

from precast.ir.graph.schema import EntrySpec, Graph
from precast.ir.graph.text import format_graph
from precast.ir.memory import caches
from precast.ir.verify.verifier import verify

TEXT = """
symbols { B: 1.. N: 0.. P: 0.. T: 1.. }
inputs {
  %cu_seqlens: int32[(1 + B)] %kv_lens: int32[B] %indices: int32[N] %indptr: int32[(1 + B)] %start: int32[B]
  %slots: int64[T] %q: float32[1, T, 4, 10] %entries: float32[1, T, 10]
}
pool main(pages=P)
group entries(pool=main, spec=entries(entry_size=10, rate=4, dtype=float32, page_size=24, window=none),
  page_indices=%indices, page_indptr=%indptr, page_start=%start, slot_mapping=%slots) {
  slot layers.0(%layers.0.entries: float32[P, 6, 10])
}
main {
  precast.write_entries(entries=%entries, cache=%layers.0.entries, slot_mapping=%slots, rate=4)
  %y: float32[1, T, 4, 10], %lse: float32[1, T, 4] = precast.paged_entry_attention(q=%q, cache=%layers.0.entries,
    selected=none, cu_seqlens=%cu_seqlens, kv_lens=%kv_lens, page_indices=%indices, page_indptr=%indptr,
    page_start=%start, scale=0.5, rate=4)
  return y=%y, lse=%lse
}
"""


def graph(*edits: tuple[str, str]) -> Graph:
    text = TEXT
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    return parse_graph(text)


def test_the_text_form_is_read_back() -> None:
    source = graph()

    assert source.caches.groups[0].spec == EntrySpec(10, "float32", 24, 4)
    assert verify(source) == ()
    assert parse_graph(format_graph(source)) == source


def test_entries_of_a_window_and_of_8_bits() -> None:
    window = graph(
        ("rate=4, dtype", "rate=1, dtype"), ("page_size=24, window=none", "page_size=24, window=5"),
        ("[P, 6, 10]", "[P, 24, 10]"), ("slot_mapping=%slots, rate=4", "slot_mapping=%slots, rate=1"),
        ("scale=0.5, rate=4", "scale=0.5, rate=1, window=5"),
    )  # fmt: skip
    eight = graph(("dtype=float32", "dtype=float8_e4m3fn"), ("float32[P, 6, 10]", "float8_e4m3fn[P, 6, 10]"))

    assert verify(window) == ()
    assert verify(eight) == ()
    assert window.caches.groups[0].spec == EntrySpec(10, "float32", 24, 1, 5)


def test_bytes_of_entries() -> None:
    (group,) = graph().caches.groups

    assert caches.filled_bytes(group) == 6 * 10 * 4
    assert caches.token_bytes(group) == 10 * 4 // 4
    assert [caches.sequence_pages(group, length) for length in (1, 24, 25)] == [1, 1, 2]


@pytest.mark.parametrize(
    ("rule", "message", "edits"),
    [
        ("IR043", "page_size: expected a multiple of rate 4, found 26", [("page_size=24", "page_size=26")]),
        ("IR043", "rate: expected at least 1, found 0", [("rate=4, dtype", "rate=0, dtype"), ("P, 6", "P, 24")]),
        ("IR043", "expected a window or a rate, found window 5 and rate 4", [("window=none", "window=5")]),
        ("IR044", "expected tensors float32[P, 6, 10] by the spec", [("[P, 6, 10]", "[P, 24, 10]")]),
        ("IR047", "rate: expected 4, the tokens of an entry", [("scale=0.5, rate=4", "scale=0.5, rate=2")]),
        ("IR047", "rate: expected 4, the tokens of an entry", [("%slots, rate=4", "%slots, rate=2")]),
        ("IR047", "page_start: expected %start", [("page_start=%start, scale", "page_start=%kv_lens, scale")]),
    ],
)
def test_violations(rule: str, message: str, edits: list[tuple[str, str]]) -> None:
    found = verify(graph(*edits))

    assert rule in {violation.rule for violation in found}
    assert any(re.search(re.escape(message), violation.message) for violation in found), found
