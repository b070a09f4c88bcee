"""Sparse attention: which keys a query sees is selected by scores of their own, and attention is over these alone."""

from __future__ import annotations

from precast.ir.graph import symbols
from precast.ir.graph.schema import Expr, TensorType
from precast.ir.ops import work
from precast.ir.ops.checks import (
    COMPUTED,
    FLOATS,
    expect,
    expect_dtype,
    expect_given,
    expect_known,
    expect_rank,
    expect_shape,
    expect_tokens,
    expect_vector,
)
from precast.ir.ops.op import SEQUENCE_BOUNDS, SEQUENCES, Args, Integers, row
from precast.ir.ops.rows_attention import (
    PAGES,
    SLOTS,
    attention,
    expect_pages,
    latent_attention,
    paged_attention,
    paged_latent_attention,
)


def write_index_keys(args: Args) -> tuple[TensorType, ...]:
    k, cache = args["k"], args["cache"]
    expect_tokens("k", k, 3)
    expect_rank("cache", cache, 3)
    expect_shape("cache's last dimension", cache.shape[2:], k.shape[2:])
    expect_shape("slot_mapping", args["slot_mapping"].shape, k.shape[1:2])
    expect_dtype("cache", cache, *FLOATS)
    expect_dtype("slot_mapping", args["slot_mapping"], "int64")
    return ()


def select_keys(args: Args) -> tuple[TensorType, ...]:
    q, k = args["q"], args["k"]
    made = _selected(args, k.shape[-1])
    expect_rank("k", k, 3)
    expect_shape("k's tokens", k.shape[:2], q.shape[:2])
    expect_dtype("k", k, q.dtype)
    expect_vector("cu_seqlens", args["cu_seqlens"], "int32")
    return (made,)


def paged_select_keys(args: Args) -> tuple[TensorType, ...]:
    cache = args["cache"]
    expect_rank("cache", cache, 3)
    expect_dtype("cache", cache, *FLOATS)
    expect_pages(args)
    return (_selected(args, cache.shape[-1]),)


def _selected(args: Args, key_size: Expr) -> TensorType:
    """Positions of `count` keys for each query, where keys are of this size."""
    q, weights, count = args["q"], args["weights"], args["count"]
    expect_tokens("q", q, 4)
    expect_known("heads and their size", *q.shape[2:])
    expect_shape("key's size", (key_size,), q.shape[3:])
    expect_shape("weights", weights.shape, q.shape[:3])
    expect_dtype("weights", weights, "float32")
    _expect_size(args, "count")
    return TensorType("int32", (*q.shape[:2], count))


def sparse_latent_attention(args: Args) -> tuple[TensorType, ...]:
    made = latent_attention(args)
    _expect_selected(args)
    return made


def paged_sparse_latent_attention(args: Args) -> tuple[TensorType, ...]:
    made = paged_latent_attention(args)
    _expect_selected(args)
    return made


def _expect_selected(args: Args) -> None:
    selected = args["selected"]
    expect_rank("selected", selected, 3)
    expect_shape("selected's tokens", selected.shape[:2], args["q"].shape[:2])
    expect_dtype("selected", selected, "int32")
    expect_given(args, "sinks", args["q"].shape[2:3], *COMPUTED)


def select_blocks(args: Args) -> tuple[TensorType, ...]:
    q, k = args["q"], args["k"]
    made = _selected_blocks(args, k.shape[-1])
    expect_rank("k", k, 3)
    expect_shape("k's tokens", k.shape[:2], q.shape[:2])
    expect_dtype("k", k, q.dtype)
    expect_vector("cu_seqlens", args["cu_seqlens"], "int32")
    return (made,)


def paged_select_blocks(args: Args) -> tuple[TensorType, ...]:
    cache = args["cache"]
    expect_rank("cache", cache, 3)
    expect_dtype("cache", cache, *FLOATS)
    expect_pages(args)
    return (_selected_blocks(args, cache.shape[-1]),)


def _selected_blocks(args: Args, key_size: Expr) -> TensorType:
    """Numbers of `count` blocks for each query and head, where keys are of this size."""
    q, count, local = args["q"], args["count"], args["local"]
    expect_tokens("q", q, 4)
    expect_known("heads and their size", *q.shape[2:])
    expect_shape("key's size", (key_size,), q.shape[3:])
    expect(isinstance(local, int) and local >= 0, f"local: expected at least 0, found {symbols.text(local)}")
    _expect_size(args, "count")
    _expect_size(args, "block_size")
    return TensorType("int32", (*q.shape[:3], count))


def block_sparse_attention(args: Args) -> tuple[TensorType, ...]:
    made = attention(args)
    _expect_blocks(args)
    return made


def paged_block_sparse_attention(args: Args) -> tuple[TensorType, ...]:
    made = paged_attention(args)
    _expect_blocks(args)
    return made


def _expect_blocks(args: Args) -> None:
    q, selected = args["q"], args["selected"]
    expect_rank("selected", selected, 4)
    expect_shape("selected's tokens", selected.shape[:2], q.shape[:2])
    expect_dtype("selected", selected, "int32")
    expect_known("heads and what is selected for them", q.shape[2], selected.shape[2])
    heads, groups = q.shape[2], selected.shape[2]
    if isinstance(heads, int) and isinstance(groups, int):
        expect(groups > 0 and heads % groups == 0, f"q: {heads} heads are no multiple of {groups} of selected")
    _expect_size(args, "block_size")


def _expect_size(args: Args, name: str) -> None:
    size = args[name]
    expect(isinstance(size, int) and size > 0, f"{name}: expected at least 1, found {symbols.text(size)}")


_SELECTED = Integers("any", "cache")
_BLOCKS = Integers("any", "k_cache")

ROWS = (
    row(
        "precast.write_index_keys(Tensor k, Tensor(a!) cache, Tensor slot_mapping) -> ()",
        write_index_keys,
        SEQUENCES,
        work.nothing,
        integers=SLOTS,
    ),
    row(
        "precast.select_keys(Tensor q, Tensor k, Tensor weights, Tensor cu_seqlens, *, float scale, int count)"
        " -> Tensor",
        select_keys,
        SEQUENCES,
        work.selection,
        integers=SEQUENCE_BOUNDS,
    ),
    row(
        "precast.paged_select_keys(Tensor q, Tensor cache, Tensor weights, Tensor cu_seqlens, Tensor kv_lens,"
        " Tensor page_indices, Tensor page_indptr, Tensor page_start, *, float scale, int count) -> Tensor",
        paged_select_keys,
        SEQUENCES,
        work.selection,
        integers=PAGES,
    ),
    row(
        "precast.sparse_latent_attention(Tensor q, Tensor latent, Tensor k_rope, Tensor weight, Tensor selected,"
        " Tensor? sinks, Tensor cu_seqlens, *, float scale, int value_size) -> Tensor",
        sparse_latent_attention,
        SEQUENCES,
        work.sparse_latent_attention,
        integers=SEQUENCE_BOUNDS | {"selected": _SELECTED},
    ),
    row(
        "precast.paged_sparse_latent_attention(Tensor q, Tensor cache, Tensor weight, Tensor selected,"
        " Tensor? sinks, Tensor cu_seqlens, Tensor kv_lens, Tensor page_indices, Tensor page_indptr, Tensor page_start,"
        " *, float scale, int value_size) -> Tensor",
        paged_sparse_latent_attention,
        SEQUENCES,
        work.sparse_latent_attention,
        integers=PAGES | {"selected": _SELECTED},
    ),
    row(
        "precast.select_blocks(Tensor q, Tensor k, Tensor cu_seqlens, *, int count, int block_size, int local)"
        " -> Tensor",
        select_blocks,
        SEQUENCES,
        work.selection,
        integers=SEQUENCE_BOUNDS,
    ),
    row(
        "precast.paged_select_blocks(Tensor q, Tensor cache, Tensor cu_seqlens, Tensor kv_lens, Tensor page_indices,"
        " Tensor page_indptr, Tensor page_start, *, int count, int block_size, int local) -> Tensor",
        paged_select_blocks,
        SEQUENCES,
        work.selection,
        integers=PAGES,
    ),
    row(
        "precast.block_sparse_attention(Tensor q, Tensor k, Tensor v, Tensor selected, Tensor cu_seqlens, *,"
        " float scale, int block_size, bool tail=False) -> Tensor",
        block_sparse_attention,
        SEQUENCES,
        work.block_sparse_attention,
        integers=SEQUENCE_BOUNDS | {"selected": _BLOCKS},
    ),
    row(
        "precast.paged_block_sparse_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor selected,"
        " Tensor cu_seqlens, Tensor kv_lens, Tensor page_indices, Tensor page_indptr, Tensor page_start, *,"
        " float scale, int block_size, Tensor? k_scale=None, Tensor? v_scale=None, bool tail=False) -> Tensor",
        paged_block_sparse_attention,
        SEQUENCES,
        work.block_sparse_attention,
        integers=PAGES | {"selected": _BLOCKS},
    ),
)
