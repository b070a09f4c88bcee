"""The launch of `decode.cu`: attention of tokens each by itself, in one launch. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add
from precast.kernels.records import Launch, Pointer, Stride
from precast.kernels.use import Use

MOST_FEW = 8
"""Tokens of a step, whatever sequences they are of, up to which clusters of blocks share a token. Each is read for by
itself, so that of several tokens of a sequence each reads all keys again."""
MOST_SIZE, WIDE = 256, 128
"""Elements of a head, whose sums are in a warp's registers; and those up to which eight warps have room."""
NUM_SMS = 132
"""Streaming multiprocessors of H100 SXM, H200 and GH200."""
RING_BYTES = 136 << 10
"""Of the rings of a block's warps, together, in steps of few tokens."""
MANY: dict[int | None, tuple[int, int]] = {
    16: (8, 136 << 10), 32: (4, 102 << 10), 48: (4, 68 << 10), 64: (2, 51 << 10), 96: (2, 34 << 10), None: (1, 26 << 10)
}  # fmt: skip
"""By sequences: the warps of a block, and bytes of their rings. With 8 key heads of 128 elements all blocks of up to 96
sequences run at once, spread evenly: 48 sequences of 4,096 keys take 188 us on an H200, with the blocks for 64 they
take 237."""
MOST_STAGES = 8
MOST_SHARED_BYTES = 227 * 1024 - 128
"""Of a block, without its barrier."""
KEYS = 16
"""Of a block."""
COLUMNS = 8
"""Query heads that a cluster takes."""
_PIECE = 16
"""Bytes that are copied at a time."""
_TILE_BYTES, _WEIGHT_BYTES = 512, 64


class Decode(NamedTuple):
    """Blocks of a cluster, warps of a block, and blocks of keys in a warp's ring."""

    cluster: int
    warps: int
    stages: int


def launches(use: Use, *, slots: int) -> tuple[Launch, ...]:
    """`precast.paged_attention` in steps of few tokens, of up to `slots` sequences."""
    return (decode_launch(use, decode_of(use, slots)),)


def beside(use: Use, *, others: Callable[[Use], tuple[Launch, ...]], slots: int | None) -> tuple[Launch, ...]:
    """`precast.paged_attention` in steps of up to `slots` sequences, None for any number: those with one token, and
    the launches of `others` for those with several."""
    return (*others(use), decode_launch(use, decode_of(use, slots), one_query=True))


def decode_of(use: Use, slots: int | None) -> Decode:
    """By how many tokens there may be; None for any number.

    Few: clusters as large as leaves each block a multiprocessor to itself. So a token's keys are shared by as many
    blocks as the GPU has for it. Rings hold what keeps memory busy; eight warps compute while others wait, and heads of
    more than 128 elements leave room for four.

    More: blocks are one by one, and as many share a multiprocessor as there are tokens for it. The more they are, the
    fewer warps and keys each has: while one looks for its keys or joins its sums, the others keep memory busy.
    """
    size = _number(use, "k_cache", 3)
    stage = stage_bytes(size, use.width("k_cache"))
    most_warps = 8 if size <= WIDE else 4
    if slots is not None and slots <= MOST_FEW:
        clusters = slots * _heads(use)
        cluster = max(each for each in (1, 2, 4, 8) if each == 1 or clusters * each <= NUM_SMS)
        return Decode(cluster, most_warps, max(1, min(MOST_STAGES, RING_BYTES // (most_warps * stage))))
    warps, ring = next(MANY[most] for most in MANY if most is None or (slots is not None and slots <= most))
    warps = min(warps, most_warps)
    while warps > 1 and ring < 2 * warps * stage:
        warps //= 2
    return Decode(1, warps, max(2, min(MOST_STAGES, ring // (warps * stage))))


def stage_bytes(size: int, width: int = 2) -> int:
    """A block of keys, and their values, in elements of `width` bytes. Rows are an odd number of pieces apart."""
    return 2 * KEYS * _PIECE * (size * width // _PIECE | 1)


def shared_bytes(size: int, how: Decode, width: int = 2) -> int:
    """What a block needs: the rings of its warps, and what its cluster joins in it; alone it joins what is left in
    the rings. A cached element has `width` bytes."""
    ring, tiles = how.stages * stage_bytes(size, width), size // 16
    if how.cluster == 1:
        return how.warps * max(ring, tiles * _TILE_BYTES + _WEIGHT_BYTES)
    return how.warps * (how.cluster * (-(-tiles // how.cluster) * _TILE_BYTES + _WEIGHT_BYTES) + ring)


def decode_launch(use: Use, how: Decode, *, one_query: bool = False) -> Launch:
    """Each token for itself, a cluster for each 8 heads that share a key head.

    `one_query`: of sequences with one token; that of others is another launch's.
    """
    heads, kv_heads, size = (_number(use, name, axis) for name, axis in (("q", 2), ("k_cache", 2), ("k_cache", 3)))
    window, chunk, cap, scale = (use.constant(name) or 0 for name in ("window", "chunk", "soft_cap", "scale"))
    has_sinks, width = use.has("sinks"), use.width("k_cache")
    assert shared_bytes(size, how, width) <= MOST_SHARED_BYTES, f"{how} wants more shared memory than a block has"
    assert how.cluster == 1 or not one_query, "blocks of a cluster wait for each other, and can't leave"
    names = ("cu_seqlens", "kv_lens", "page_indices", "page_indptr", "page_start")
    return Launch(
        kernel="precast.kernels.attention/decode.cu:decode_attention",
        grid=(how.cluster, _heads(use), add(_sequences(use), 1) if one_query else use.shape("q")[1]),
        args=(
            Pointer("out.0"), Pointer("q"), Pointer("k_cache"), Pointer("v_cache"),
            *(Pointer(name) if use.has(name) else None for name in ("k_scale", "v_scale", "sinks", "slopes")),
            *(Pointer(name) for name in names), use.shape("q")[1], _sequences(use),
            *(Stride("q", axis) for axis in (1, 2, 3)),
            *(Stride(name, axis) for name in ("k_cache", "v_cache") for axis in (0, 1, 2)),
        ),
        constants={
            "FLOAT16": use.dtype == "float16", "CACHE_FLOAT8": width == 1, "K_SCALE": use.has("k_scale"),
            "V_SCALE": use.has("v_scale"), "HEADS": heads, "KV_HEADS": kv_heads, "SIZE": size,
            "PAGE_SIZE": _number(use, "k_cache", 1), "SCALE": float(scale), "SOFT_CAP": float(cap),
            "WINDOW": window, "CHUNK": chunk, "SINKS": has_sinks,
            "SINKS_FLOAT32": has_sinks and use.width("sinks") == 4, "SLOPES": use.has("slopes"),
            "CLUSTER": how.cluster, "WARPS": how.warps, "STAGES": how.stages,
            "ONE_QUERY": one_query,
        },
        block=32 * how.warps,
        shared_bytes=shared_bytes(size, how, width),
        pdl=True,
    )  # fmt: skip


def _heads(use: Use) -> int:
    """How many clusters a token has: one for up to 8 heads that share a key head."""
    heads, kv_heads = _number(use, "q", 2), _number(use, "k_cache", 2)
    return kv_heads * -(-(heads // kv_heads) // COLUMNS)


def _number(use: Use, name: str, axis: int) -> int:
    found = use.number(name, axis)
    assert found is not None, f"axis {axis} of {name} is fixed by the model"
    return found


def _sequences(use: Use) -> Expr:
    return add(use.shape("cu_seqlens")[0], -1)
