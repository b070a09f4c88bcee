"""Attention over entries: one vector for each block of tokens, which all heads share, key and value at once."""

from __future__ import annotations

from precast.ir.graph import symbols
from precast.ir.graph.schema import Dtype, Expr, TensorType
from precast.ir.ops import work
from precast.ir.ops.checks import (
    FLOATS,
    expect,
    expect_dtype,
    expect_known,
    expect_positive,
    expect_rank,
    expect_shape,
    expect_tokens,
    expect_vector,
)
from precast.ir.ops.op import SEQUENCE_BOUNDS, SEQUENCES, Args, Integers, row
from precast.ir.ops.rows_attention import PAGES, SLOTS, expect_pages


def write_entries(args: Args) -> tuple[TensorType, ...]:
    entries, cache = args["entries"], args["cache"]
    expect_tokens("entries", entries, 3)
    expect_rank("cache", cache, 3)
    expect_shape("cache's last dimension", cache.shape[2:], entries.shape[2:])
    expect_shape("slot_mapping", args["slot_mapping"].shape, entries.shape[1:2])
    expect_dtype("cache", cache, *FLOATS)
    expect_dtype("slot_mapping", args["slot_mapping"], "int64")
    _expect_rate(args)
    return ()


def entry_attention(args: Args) -> tuple[TensorType, ...]:
    _expect_packed(args)
    return _attended(args, args["entries"].shape[2])


def paged_entry_attention(args: Args) -> tuple[TensorType, ...]:
    _expect_paged(args)
    return _attended(args, args["cache"].shape[2])


def select_entries(args: Args) -> tuple[TensorType, ...]:
    _expect_packed(args)
    return _selected(args, args["entries"].shape[2])


def paged_select_entries(args: Args) -> tuple[TensorType, ...]:
    _expect_paged(args)
    return _selected(args, args["cache"].shape[2])


def _expect_packed(args: Args) -> None:
    q, entries = args["q"], args["entries"]
    expect_tokens("q", q, 4)
    expect_rank("entries", entries, 3)
    expect_shape("entries' tokens", entries.shape[:2], q.shape[:2])
    expect_dtype("entries", entries, q.dtype)
    expect_vector("cu_seqlens", args["cu_seqlens"], "int32")


def _expect_paged(args: Args) -> None:
    expect_tokens("q", args["q"], 4)
    expect_rank("cache", args["cache"], 3)
    expect_dtype("cache", args["cache"], *FLOATS)
    expect_pages(args)


def _attended(args: Args, entry_size: Expr) -> tuple[TensorType, ...]:
    """What heads find, and how much weight it has: entries are of this size."""
    q, selected = args["q"], args.get("selected")
    expect_known("heads and their size", *q.shape[2:])
    expect_shape("entries' size", (entry_size,), q.shape[3:])
    if selected is not None:
        expect_rank("selected", selected, 3)
        expect_shape("selected's tokens", selected.shape[:2], q.shape[:2])
        expect_dtype("selected", selected, "int32")
    expect_positive(args, "window")
    _expect_rate(args)
    given = [name for name in ("window", "selected") if args.get(name) is not None]
    expect(len(given) < 2, "window, selected: expected one of them at most, found both")
    expect("window" not in given or args["rate"] == 1, f"window: expected none with a rate of {args['rate']}")
    wide: Dtype = "float64" if q.dtype == "float64" else "float32"
    return TensorType(wide, q.shape), TensorType(wide, q.shape[:3])


def _selected(args: Args, entry_size: Expr) -> tuple[TensorType, ...]:
    q, weights, count = args["q"], args["weights"], args["count"]
    expect_known("heads and their size", *q.shape[2:])
    expect_shape("entries' size", (entry_size,), q.shape[3:])
    expect_shape("weights", weights.shape, q.shape[:3])
    expect_dtype("weights", weights, "float32")
    expect(isinstance(count, int) and count > 0, f"count: expected at least 1, found {symbols.text(count)}")
    _expect_rate(args)
    return (TensorType("int32", (*q.shape[:2], count)),)


def _expect_rate(args: Args) -> None:
    rate = args["rate"]
    expect(isinstance(rate, int) and rate > 0, f"rate: expected at least 1, found {symbols.text(rate)}")


_SELECTED = {"selected": Integers("any", "cache")}
_PAGED = "Tensor cu_seqlens, Tensor kv_lens, Tensor page_indices, Tensor page_indptr, Tensor page_start"

ROWS = (
    row(
        "precast.write_entries(Tensor entries, Tensor(a!) cache, Tensor slot_mapping, *, int rate) -> ()",
        write_entries,
        SEQUENCES,
        work.nothing,
        integers=SLOTS,
    ),
    row(
        "precast.entry_attention(Tensor q, Tensor entries, Tensor? selected, Tensor cu_seqlens, *, float scale,"
        " int rate, int? window=None) -> (Tensor, Tensor)",
        entry_attention,
        SEQUENCES,
        work.entry_attention,
        integers=SEQUENCE_BOUNDS | _SELECTED,
    ),
    row(
        f"precast.paged_entry_attention(Tensor q, Tensor cache, Tensor? selected, {_PAGED}, *, float scale, int rate,"
        " int? window=None) -> (Tensor, Tensor)",
        paged_entry_attention,
        SEQUENCES,
        work.entry_attention,
        integers=PAGES | _SELECTED,
    ),
    row(
        "precast.select_entries(Tensor q, Tensor entries, Tensor weights, Tensor cu_seqlens, *, float scale, int rate,"
        " int count) -> Tensor",
        select_entries,
        SEQUENCES,
        work.entry_selection,
        integers=SEQUENCE_BOUNDS,
    ),
    row(
        f"precast.paged_select_entries(Tensor q, Tensor cache, Tensor weights, {_PAGED}, *, float scale, int rate,"
        " int count) -> Tensor",
        paged_select_entries,
        SEQUENCES,
        work.entry_selection,
        integers=PAGES,
    ),
)
