"""Latent attention in the language: the shape rules of its ops, its caches in the plan, in text and in the verifier."""

from __future__ import annotations

import re

import pytest
from graph_text import parse_graph

from precast.ir.graph.schema import Apply, Expr, Graph, LatentSpec, TensorType
from precast.ir.graph.text import format_graph
from precast.ir.memory import caches
from precast.ir.ops import table as ops
from precast.ir.ops.op import ShapeError
from precast.ir.verify.verifier import verify


def f32(*shape: Expr) -> TensorType:
    return TensorType("float32", shape)


def i32(*shape: Expr) -> TensorType:
    return TensorType("int32", shape)


# --- shape rules -------------------------------------------------------------------------------------------------

B1 = Apply("add", ("B", 1))
PACKED = {
    "q": f32(1, "T", 4, 10), "latent": f32(1, "T", 16), "k_rope": f32(1, "T", 3), "weight": f32(60, 16),
    "cu_seqlens": i32(B1), "scale": 0.5, "value_size": 8,
}  # fmt: skip
WRITE = {
    "latent": f32(1, "T", 16), "k_rope": f32(1, "T", 3), "cache": TensorType("bfloat16", ("P", 8, 19)),
    "slot_mapping": TensorType("int64", ("T",)),
}  # fmt: skip
PAGED = {
    "q": f32(1, "T", 4, 10), "cache": f32("P", 8, 19), "weight": f32(60, 16), "cu_seqlens": i32(B1),
    "kv_lens": i32("B"), "page_indices": i32("N"), "page_indptr": i32(B1), "page_start": i32("B"), "scale": 0.5,
    "value_size": 8,
}  # fmt: skip
CALLS = {"latent_attention": PACKED, "write_latent": WRITE, "paged_latent_attention": PAGED}
RANKS_HEADS = Apply("floordiv", (16, "tp"))
HEADS = {"q": f32(1, "T", RANKS_HEADS, 10), "weight": f32(Apply("mul", (15, RANKS_HEADS)), 16)}


def infer(op: str, **changes: object) -> tuple[TensorType, ...]:
    definition = ops.lookup(f"precast.{op}")
    assert definition is not None
    return definition.shape_rule({**CALLS[op], **changes})


def test_results() -> None:
    assert infer("latent_attention") == infer("paged_latent_attention", window=7) == (f32(1, "T", 4, 8),)
    assert infer("latent_attention", **HEADS) == (f32(1, "T", RANKS_HEADS, 8),)
    assert infer("write_latent") == ()


@pytest.mark.parametrize(
    ("op", "changes", "message"),
    [
        ("latent_attention", {"q": f32("T", 4, 10)}, "q: expected 4 dimensions"),
        ("latent_attention", {"latent": f32(1, "B", 16)}, "latent's tokens: expected shape"),
        ("latent_attention", {"k_rope": f32(1, "B", 3)}, "k_rope's tokens: expected shape"),
        ("latent_attention", {"k_rope": TensorType("float16", (1, "T", 3))}, "k_rope: expected dtype float32"),
        ("latent_attention", {"k_rope": f32(1, "T", 11)}, "less the rope part: expected at least 0, found -1"),
        ("latent_attention", {"weight": f32(60, 15)}, "weight: expected shape [60, 16]"),
        ("latent_attention", {"weight": f32(59, 16)}, "weight: expected shape [60, 16]"),
        ("latent_attention", {"value_size": 7}, "weight: expected shape [56, 16]"),
        ("latent_attention", {"value_size": 0, "weight": f32(28, 16)}, "value_size: expected at least 1"),
        ("latent_attention", {"window": 0}, "window: expected None or at least 1"),
        ("latent_attention", {"weight": TensorType("float16", (60, 16))}, "weight: expected dtype float32"),
        ("latent_attention", {"cu_seqlens": TensorType("int64", (B1,))}, "cu_seqlens: expected dtype int32"),
        ("write_latent", {"cache": f32("P", 8, 18)}, "cache's last dimension: expected shape [19]"),
        ("write_latent", {"cache": f32("P", 8, 1, 19)}, "cache: expected 3 dimensions"),
        ("write_latent", {"k_rope": f32(1, "B", 3)}, "k_rope's tokens"),
        ("write_latent", {"slot_mapping": TensorType("int64", ("B",))}, "slot_mapping: expected shape"),
        ("write_latent", {"slot_mapping": i32("T")}, "slot_mapping: expected dtype int64"),
        ("write_latent", {"cache": TensorType("int8", ("P", 8, 19))}, "cache: expected dtype"),
        ("paged_latent_attention", {"cache": TensorType("int8", ("P", 8, 19))}, "cache: expected dtype"),
        ("paged_latent_attention", {"cache": f32("P", 8, 15)}, "cache, less the latent: expected at least 0"),
        ("paged_latent_attention", {"cache": f32("P", 8, 20)}, "weight: expected shape [56, 16]"),
        ("paged_latent_attention", {"page_start": i32(B1)}, "page_start: expected shape"),
        ("paged_latent_attention", {"page_indptr": i32("B")}, "page_indptr: expected shape"),
        ("paged_latent_attention", {"page_indices": TensorType("int64", ("N",))}, "page_indices: expected dtype"),
    ],
)
def test_refused_arguments(op: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ShapeError, match=re.escape(message)):
        infer(op, **changes)


# --- plan --------------------------------------------------------------------------------------------------------

TEXT = """
symbols { B: 1.. N: 0.. P: 0.. T: 1.. }
inputs {
  %cu_seqlens: int32[(1 + B)] %kv_lens: int32[B] %indices: int32[N] %indptr: int32[(1 + B)] %start: int32[B]
  %slots: int64[T] %q: float32[1, T, 4, 10] %latent: float32[1, T, 16] %k_rope: float32[1, T, 3]
}
params { %weight: float32[60, 16] = read("weight", [60, 16], float32) }
pool main(pages=P)
group latent(pool=main, spec=latent(latent_size=16, rope_size=3, dtype=float32, page_size=8, window=5),
  page_indices=%indices, page_indptr=%indptr, page_start=%start, slot_mapping=%slots) {
  slot layers.0(%layers.0.latent: float32[P, 8, 19])
  slot layers.1(%layers.1.latent: float32[P, 8, 19])
}
main {
  precast.write_latent(latent=%latent, k_rope=%k_rope, cache=%layers.0.latent, slot_mapping=%slots)
  %y: float32[1, T, 4, 8] = precast.paged_latent_attention(q=%q, cache=%layers.0.latent, weight=%weight,
    cu_seqlens=%cu_seqlens, kv_lens=%kv_lens, page_indices=%indices, page_indptr=%indptr, page_start=%start,
    scale=0.5, value_size=8, window=5)
  return y=%y
}
"""


SIZES = "latent_size=16, rope_size=3"


def graph(*edits: tuple[str, str]) -> Graph:
    text = TEXT
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    return parse_graph(text)


def test_the_text_form_is_read_back() -> None:
    source = graph()

    assert source.caches.groups[0].spec == LatentSpec(16, 3, "float32", 8, 5)
    assert parse_graph(format_graph(source)) == source
    assert "spec=latent(latent_size=16, rope_size=3, dtype=float32, page_size=8, window=5)" in format_graph(source)
    whole = graph(("page_size=8, window=5", "page_size=8, window=none"))
    assert parse_graph(format_graph(whole)) == whole


def test_a_graph_with_latents_is_valid() -> None:
    assert verify(graph()) == ()


def of_dtype(dtype: str) -> tuple[tuple[str, str], ...]:
    return ("dtype=float32, page_size", f"dtype={dtype}, page_size"), ("float32[P, 8, 19]", f"{dtype}[P, 8, 19]")


def test_latents_of_8_bits() -> None:
    source = graph(*of_dtype("float8_e4m3fn"))

    assert verify(source) == ()
    assert caches.token_bytes(source.caches.groups[0]) == 2 * (16 + 3)
    assert caches.page_layout(source.caches.groups[0]) == {"layers.0.latent": 0, "layers.1.latent": 256}
    assert parse_graph(format_graph(source)) == source


def test_a_cache_of_a_type_that_the_ops_cannot_take() -> None:
    found = verify(graph(*of_dtype("int8")))

    assert [(violation.rule, "cache: expected dtype float8_e4m3fn or float16" in violation.message)
            for violation in found] == [("IR022", True)] * 2  # fmt: skip
    assert "precast.write_latent" in found[0].where
    assert "precast.paged_latent_attention" in found[1].where


def test_bytes_of_latents() -> None:
    (group,) = graph().caches.groups

    assert caches.token_bytes(group) == 2 * (16 + 3) * 4
    assert caches.sequence_bytes(group, 9) == 2 * 8 * caches.token_bytes(group)
    assert caches.visible_bytes(group, 9) == 5 * caches.token_bytes(group)


@pytest.mark.parametrize(
    ("rule", "message", "edit"),
    [
        ("IR043", "rope_size: expected at least 1, found 0", (SIZES, "latent_size=19, rope_size=0")),
        ("IR043", "latent_size: expected at least 1, found 0", (SIZES, "latent_size=0, rope_size=19")),
        ("IR044", r"expected tensors float32\[P, 8, 18\] by the spec", ("latent_size=16", "latent_size=15")),
        ("IR044", r"expected tensors float8_e4m3fn\[P, 8, 19\] by the spec",
         ("dtype=float32, p", "dtype=float8_e4m3fn, p")),
        ("IR047", "slot_mapping: expected %slots", ("k_rope=%k_rope, cache=%layers.0.latent, slot_mapping=%slots",
                                                    "k_rope=%k_rope, cache=%layers.0.latent, slot_mapping=%others")),
        ("IR047", "page_start: expected %start", ("page_start=%start,\n    scale", "page_start=%kv_lens,\n    scale")),
        ("IR047", "window: expected 5", ("value_size=8, window=5", "value_size=8, window=4")),
        ("IR047", "window: expected 5", ("value_size=8, window=5", "value_size=8")),
    ],
)  # fmt: skip
def test_violations(rule: str, message: str, edit: tuple[str, str]) -> None:
    edits = [edit]
    if "%others" in edit[1]:
        edits.append(("%slots: int64[T] %q", "%slots: int64[T] %others: int64[T] %q"))

    found = verify(graph(*edits))

    assert {violation.rule for violation in found} == {rule}
    assert re.search(message, found[0].message), found
