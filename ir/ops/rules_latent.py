"""Shape rules of latent attention: keys and values that are products of a latent, which all heads share."""

from __future__ import annotations

from precast.ir.graph import symbols
from precast.ir.graph.schema import Expr, TensorType
from precast.ir.ops.rules import COMPUTED, FLOATS, Args, _dtype, _expect, _rank, _same


def latent_attention(args: Args) -> tuple[TensorType, ...]:
    q, latent, k_rope = args["q"], args["latent"], args["k_rope"]
    _rank("q", q, 4)
    _dtype("q", q, *COMPUTED)
    for name in ("latent", "k_rope"):
        _rank(name, args[name], 3)
        _same(f"{name}'s tokens", args[name].shape[:2], q.shape[:2])
        _dtype(name, args[name], q.dtype)
    _rank("cu_seqlens", args["cu_seqlens"], 1)
    _dtype("cu_seqlens", args["cu_seqlens"], "int32")
    return (_heads(args, latent.shape[2], k_rope.shape[2]),)


def write_latent(args: Args) -> tuple[TensorType, ...]:
    latent, k_rope, cache = args["latent"], args["k_rope"], args["cache"]
    _rank("latent", latent, 3)
    _rank("k_rope", k_rope, 3)
    _rank("cache", cache, 3)
    _same("latent's first dimension", latent.shape[:1], (1,))
    _same("k_rope's tokens", k_rope.shape[:2], latent.shape[:2])
    _same("cache's last dimension", cache.shape[2:], (symbols.add(latent.shape[2], k_rope.shape[2]),))
    _same("slot_mapping", args["slot_mapping"].shape, latent.shape[1:2])
    _dtype("latent", latent, *COMPUTED)
    _dtype("k_rope", k_rope, latent.dtype)
    _dtype("cache", cache, *FLOATS)
    _dtype("slot_mapping", args["slot_mapping"], "int64")
    return ()


def paged_latent_attention(args: Args) -> tuple[TensorType, ...]:
    cache, weight = args["cache"], args["weight"]
    _rank("q", args["q"], 4)
    _rank("cache", cache, 3)
    _rank("weight", weight, 2)
    _dtype("q", args["q"], *COMPUTED)
    _dtype("cache", cache, *FLOATS)
    for name in ("cu_seqlens", "kv_lens", "page_indices", "page_indptr", "page_start"):
        _rank(name, args[name], 1)
        _dtype(name, args[name], "int32")
    sequences = args["kv_lens"].shape
    bounds = (symbols.add(sequences[0], 1),)
    _same("cu_seqlens", args["cu_seqlens"].shape, bounds)
    _same("page_indptr", args["page_indptr"].shape, bounds)
    _same("page_start", args["page_start"].shape, sequences)
    latent = weight.shape[1]
    return (_heads(args, latent, symbols.add(cache.shape[2], symbols.mul(-1, latent))),)


def _heads(args: Args, latent: Expr, rope: Expr) -> TensorType:
    """The result, where the weight makes keys and values of these sizes for q's heads."""
    q, weight, value = args["q"], args["weight"], args["value_size"]
    _same("q's first dimension", q.shape[:1], (1,))
    nope = symbols.add(q.shape[3], symbols.mul(-1, rope))
    for name, size in (("q's last dimension, less the rope part", nope), ("cache, less the latent", rope)):
        _expect(not isinstance(size, int) or size >= 0, f"{name}: expected at least 0, found {symbols.text(size)}")
    _expect(isinstance(value, int) and value > 0, f"value_size: expected at least 1, found {value}")
    _same("weight", weight.shape, (symbols.mul(q.shape[2], symbols.add(nope, value)), latent))
    _dtype("weight", weight, q.dtype)
    window = args.get("window")
    ok = window is None or (isinstance(window, int) and window > 0)
    _expect(ok, f"window: expected None or at least 1, found {window}")
    return TensorType(q.dtype, (*q.shape[:-1], value))
