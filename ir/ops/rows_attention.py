"""Attention over keys and values, or over latents from which they are made, and the writing of their caches."""

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
    expect_positive,
    expect_rank,
    expect_shape,
    expect_vector,
)
from precast.ir.ops.op import GROUP, SEQUENCE_BOUNDS, SEQUENCE_LENGTHS, SEQUENCES, Args, row
from precast.ir.ops.rows_tokens import rotary


def attention(args: Args) -> tuple[TensorType, ...]:
    q, k, v = args["q"], args["k"], args["v"]
    expect_rank("k", k, 4)
    expect_rank("v", v, 4)
    expect_shape("k's tokens", k.shape[:2], q.shape[:2])
    expect_shape("v's tokens and heads", v.shape[:3], k.shape[:3])
    expect_dtype("k", k, q.dtype)
    expect_dtype("v", v, q.dtype)
    expect_vector("cu_seqlens", args["cu_seqlens"], "int32")
    return (_heads(args, k, v),)


def write_kv(args: Args) -> tuple[TensorType, ...]:
    for name in ("k", "v"):
        new, pages = args[name], args[f"{name}_cache"]
        expect_rank(name, new, 4)
        expect_rank(f"{name}_cache", pages, 4)
        expect_shape(f"{name}'s first dimension", new.shape[:1], (1,))
        expect_shape(f"{name}_cache's heads and head size", pages.shape[2:], new.shape[2:])
        expect_shape("slot_mapping", args["slot_mapping"].shape, new.shape[1:2])
    expect_shape("v_cache's pages and heads", args["v_cache"].shape[:3], args["k_cache"].shape[:3])
    expect_dtype("k", args["k"], *COMPUTED)
    expect_dtype("v", args["v"], args["k"].dtype)
    expect_dtype("k_cache", args["k_cache"], *FLOATS)
    expect_dtype("v_cache", args["v_cache"], args["k_cache"].dtype)
    expect_dtype("slot_mapping", args["slot_mapping"], "int64")
    _scales(args)
    return ()


def rotary_write_kv(args: Args) -> tuple[TensorType, ...]:
    write_kv(args)
    q, k = args["q"], args["k"]
    expect_shape("q's tokens and head size", (*q.shape[:2], *q.shape[3:]), (*k.shape[:2], *k.shape[3:]))
    expect_dtype("q", q, k.dtype)
    tables = {"cos": args["cos"], "sin": args["sin"]}
    for x in (q, k):
        rotary({"x": x, **tables})
    has_norm = args.get("eps") is not None
    for name in ("q_weight", "k_weight"):
        expect_given(args, name, q.shape[-1:], *COMPUTED)
        expect(has_norm or args.get(name) is None, f"{name}: expected none without eps")
    return (q,)


def paged_attention(args: Args) -> tuple[TensorType, ...]:
    k_cache, v_cache = args["k_cache"], args["v_cache"]
    expect_rank("k_cache", k_cache, 4)
    expect_rank("v_cache", v_cache, 4)
    expect_dtype("k_cache", k_cache, *FLOATS)
    expect_dtype("v_cache", v_cache, k_cache.dtype)
    expect_shape("v_cache's pages and heads", v_cache.shape[:3], k_cache.shape[:3])
    expect_pages(args)
    _scales(args)
    return (_heads(args, k_cache, v_cache),)


def latent_attention(args: Args) -> tuple[TensorType, ...]:
    q, latent, k_rope = args["q"], args["latent"], args["k_rope"]
    expect_rank("q", q, 4)
    expect_dtype("q", q, *COMPUTED)
    for name in ("latent", "k_rope"):
        expect_rank(name, args[name], 3)
        expect_shape(f"{name}'s tokens", args[name].shape[:2], q.shape[:2])
        expect_dtype(name, args[name], q.dtype)
    expect_vector("cu_seqlens", args["cu_seqlens"], "int32")
    return (_latent_heads(args, latent.shape[2], k_rope.shape[2]),)


def write_latent(args: Args) -> tuple[TensorType, ...]:
    latent, k_rope, cache = args["latent"], args["k_rope"], args["cache"]
    expect_rank("latent", latent, 3)
    expect_rank("k_rope", k_rope, 3)
    expect_rank("cache", cache, 3)
    expect_shape("latent's first dimension", latent.shape[:1], (1,))
    expect_shape("k_rope's tokens", k_rope.shape[:2], latent.shape[:2])
    expect_shape("cache's last dimension", cache.shape[2:], (symbols.add(latent.shape[2], k_rope.shape[2]),))
    expect_shape("slot_mapping", args["slot_mapping"].shape, latent.shape[1:2])
    expect_dtype("latent", latent, *COMPUTED)
    expect_dtype("k_rope", k_rope, latent.dtype)
    expect_dtype("cache", cache, *FLOATS)
    expect_dtype("slot_mapping", args["slot_mapping"], "int64")
    return ()


def paged_latent_attention(args: Args) -> tuple[TensorType, ...]:
    cache, weight = args["cache"], args["weight"]
    expect_rank("q", args["q"], 4)
    expect_rank("cache", cache, 3)
    expect_rank("weight", weight, 2)
    expect_dtype("q", args["q"], *COMPUTED)
    expect_dtype("cache", cache, *FLOATS)
    expect_pages(args)
    latent = weight.shape[1]
    return (_latent_heads(args, latent, symbols.add(cache.shape[2], symbols.mul(-1, latent))),)


def expect_pages(args: Args) -> None:
    """The metadata that say which pages hold a sequence's keys."""
    for name in ("cu_seqlens", "kv_lens", "page_indices", "page_indptr", "page_start"):
        expect_vector(name, args[name], "int32")
    sequences = args["kv_lens"].shape
    bounds = (symbols.add(sequences[0], 1),)
    expect_shape("cu_seqlens", args["cu_seqlens"].shape, bounds)
    expect_shape("page_indptr", args["page_indptr"].shape, bounds)
    expect_shape("page_start", args["page_start"].shape, sequences)


def _scales(args: Args) -> None:
    """By what cached keys and values were divided: both or neither, and of 8 bits alone."""
    given = [name for name in ("k_scale", "v_scale") if args.get(name) is not None]
    for name in given:
        expect_given(args, name, (1,), "float32")
    expect(len(given) != 1, f"k_scale, v_scale: expected both or neither, found {' '.join(given)}")
    cached = args["k_cache"].dtype
    expect(not given or cached == "float8_e4m3fn", f"k_scale: expected none for a cache of {cached}")


def _heads(args: Args, key: TensorType, value: TensorType) -> TensorType:
    q = args["q"]
    expect_rank("q", q, 4)
    expect_shape("q's first dimension", q.shape[:1], (1,))
    expect_shape("key's head size", key.shape[-1:], q.shape[-1:])
    heads, kv_heads = q.shape[2], key.shape[-2]
    expect_known("heads and their sizes", heads, kv_heads, q.shape[3], value.shape[-1])
    if isinstance(heads, int) and isinstance(kv_heads, int):
        expect(kv_heads > 0 and heads % kv_heads == 0, f"q: {heads} heads are no multiple of {kv_heads} kv heads")
    expect_given(args, "sinks", (heads,), *COMPUTED)
    expect_positive(args, "window")
    expect_given(args, "slopes", (heads,), "float32")
    _bias(args)
    expect_positive(args, "chunk")
    both = args.get("window") is not None and args.get("chunk") is not None
    expect(not both, "window, chunk: expected one of them at most, found both")
    expect_dtype("q", q, *COMPUTED)
    return TensorType(q.dtype, (*q.shape[:-1], value.shape[-1]))


def _bias(args: Args) -> None:
    """A bias has a row for each of q's heads, with a number for each distance up to its size."""
    bias = args.get("bias")
    if bias is None:
        return
    expect_rank("bias", bias, 4)
    expect_shape("bias's tokens and heads", bias.shape[:3], args["q"].shape[:3])
    expect_known("bias's size", bias.shape[3])
    expect(not isinstance(bias.shape[3], int) or bias.shape[3] > 0, "bias: expected a size of at least 1, found 0")
    expect_dtype("bias", bias, *COMPUTED)


def _latent_heads(args: Args, latent: Expr, rope: Expr) -> TensorType:
    """The result, where the weight makes keys and values of these sizes for q's heads."""
    q, weight, value = args["q"], args["weight"], args["value_size"]
    expect_shape("q's first dimension", q.shape[:1], (1,))
    expect_known("heads and their sizes", q.shape[2], q.shape[3], latent, rope)
    nope = symbols.add(q.shape[3], symbols.mul(-1, rope))
    for name, size in (("q's last dimension, less the rope part", nope), ("cache, less the latent", rope)):
        expect(not isinstance(size, int) or size >= 0, f"{name}: expected at least 0, found {symbols.text(size)}")
    expect(isinstance(value, int) and value > 0, f"value_size: expected at least 1, found {value}")
    expect_shape("weight", weight.shape, (symbols.mul(q.shape[2], symbols.add(nope, value)), latent))
    expect_dtype("weight", weight, q.dtype)
    expect_positive(args, "window")
    return TensorType(q.dtype, (*q.shape[:-1], value))


PAGES = SEQUENCE_LENGTHS | dict.fromkeys(("page_indices", "page_indptr", "page_start"), GROUP)
"""What the integers are for that say which pages hold a sequence's keys."""
SLOTS = {"slot_mapping": GROUP}
"""The same of those that say where a step's tokens are written."""

ROWS = (
    row(
        "precast.attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor cu_seqlens, *, float scale,"
        " int? window=None, float? soft_cap=None, Tensor? slopes=None, int? chunk=None, Tensor? bias=None) -> Tensor",
        attention,
        SEQUENCES,
        work.attention,
        integers=SEQUENCE_BOUNDS,
    ),
    row(
        "precast.write_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping,"
        " *, Tensor? k_scale=None, Tensor? v_scale=None) -> ()",
        write_kv,
        SEQUENCES,
        work.nothing,
        integers=SLOTS,
    ),
    row(
        "precast.rotary_write_kv(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor? q_weight,"
        " Tensor? k_weight, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, *, bool interleaved,"
        " float? eps=None, float offset=0.0, bool cast_before_scale=False, Tensor? k_scale=None,"
        " Tensor? v_scale=None) -> Tensor",
        rotary_write_kv,
        SEQUENCES,
        integers=SLOTS,
    ),
    row(
        "precast.paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? sinks, Tensor cu_seqlens,"
        " Tensor kv_lens, Tensor page_indices, Tensor page_indptr, Tensor page_start, *, float scale,"
        " int? window=None, float? soft_cap=None, Tensor? slopes=None, int? chunk=None, Tensor? bias=None,"
        " Tensor? k_scale=None, Tensor? v_scale=None) -> Tensor",
        paged_attention,
        SEQUENCES,
        work.attention,
        integers=PAGES,
    ),
    row(
        "precast.latent_attention(Tensor q, Tensor latent, Tensor k_rope, Tensor weight, Tensor cu_seqlens, *,"
        " float scale, int value_size, int? window=None) -> Tensor",
        latent_attention,
        SEQUENCES,
        work.latent_attention,
        integers=SEQUENCE_BOUNDS,
    ),
    row(
        "precast.write_latent(Tensor latent, Tensor k_rope, Tensor(a!) cache, Tensor slot_mapping) -> ()",
        write_latent,
        SEQUENCES,
        work.nothing,
        integers=SLOTS,
    ),
    row(
        "precast.paged_latent_attention(Tensor q, Tensor cache, Tensor weight, Tensor cu_seqlens, Tensor kv_lens,"
        " Tensor page_indices, Tensor page_indptr, Tensor page_start, *, float scale, int value_size,"
        " int? window=None) -> Tensor",
        paged_latent_attention,
        SEQUENCES,
        work.latent_attention,
        integers=PAGES,
    ),
)
