"""The launch of `decode.cu`: attention of few tokens, in one launch. No torch."""

from __future__ import annotations

from typing import NamedTuple

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add
from precast.kernels.records import Launch, Pointer, Stride
from precast.kernels.use import Use

KEYS = 16
"""Of a block."""
COLUMNS = 8
"""Query heads that a cluster takes."""
_PAD = 16
_TILE_BYTES, _WEIGHT_BYTES = 512, 64


class Decode(NamedTuple):
    """Blocks of a cluster, warps of a block, and blocks of keys in a warp's ring; whether keys are read early, and
    warps meet at a barrier."""

    cluster: int
    warps: int
    stages: int
    early: bool = True
    barrier: bool = False


def shared_bytes(size: int, how: Decode) -> int:
    """What a block needs: what its cluster joins in it, and the rings of its warps."""
    own_tiles = -(-(size // 16) // how.cluster)
    joined = how.cluster * how.warps * (own_tiles * _TILE_BYTES + _WEIGHT_BYTES)
    return joined + how.warps * how.stages * 2 * KEYS * (2 * size + _PAD)


def decode_launch(use: Use, how: Decode) -> Launch:
    """Each token for itself, a cluster for each 8 heads that share a key head."""
    heads, kv_heads, size = (_number(use, name, axis) for name, axis in (("q", 2), ("k_cache", 2), ("k_cache", 3)))
    window, chunk, cap, scale = (use.constant(name) or 0 for name in ("window", "chunk", "soft_cap", "scale"))
    has_sinks = use.has("sinks")
    names = ("cu_seqlens", "kv_lens", "page_indices", "page_indptr", "page_start")
    return Launch(
        kernel="precast.kernels.attention/decode.cu:decode_attention",
        grid=(how.cluster, kv_heads * -(-(heads // kv_heads) // COLUMNS), use.shape("q")[1]),
        args=(
            Pointer("out.0"), Pointer("q"), Pointer("k_cache"), Pointer("v_cache"),
            *(Pointer(name) if use.has(name) else None for name in ("sinks", "slopes")),
            *(Pointer(name) for name in names), _sequences(use),
            *(Stride("q", axis) for axis in (1, 2, 3)),
            *(Stride(name, axis) for name in ("k_cache", "v_cache") for axis in (0, 1, 2)),
        ),
        constants={
            "FLOAT16": use.dtype == "float16", "HEADS": heads, "KV_HEADS": kv_heads, "SIZE": size,
            "PAGE_SIZE": _number(use, "k_cache", 1), "SCALE": float(scale), "SOFT_CAP": float(cap),
            "WINDOW": window, "CHUNK": chunk, "SINKS": has_sinks,
            "SINKS_FLOAT32": has_sinks and use.width("sinks") == 4, "SLOPES": use.has("slopes"),
            "CLUSTER": how.cluster, "WARPS": how.warps, "STAGES": how.stages, "LATE": not how.early,
            "BARRIER": how.barrier,
        },
        block=32 * how.warps,
        shared_bytes=shared_bytes(size, how),
        pdl=True,
    )  # fmt: skip


def _number(use: Use, name: str, axis: int) -> int:
    found = use.number(name, axis)
    assert found is not None, f"axis {axis} of {name} is fixed by the model"
    return found


def _sequences(use: Use) -> Expr:
    return add(use.shape("cu_seqlens")[0], -1)
