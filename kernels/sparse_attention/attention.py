"""The launches of `attend.cu` and `attend_groups.cu`: attention to selected latents on Hopper. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from precast.ir.graph.schema import Expr
from precast.kernels.latent_attention.launches import FEW_TOKENS, sizes_of
from precast.kernels.records import Condition, Launch, Pointer
from precast.kernels.rows import known, real
from precast.kernels.sparse_attention.launches import attend_products, attended_bytes, attending, joined
from precast.kernels.use import Use

NUM_SMS = 132
"""Streaming multiprocessors of H100 SXM, H200 and GH200."""
TILE = 64
"""Entries that a block takes at a time."""
WARPS = 8
"""Of a block, that multiply."""
FEW_ROWS, GROUP_ROWS = 32, 64
"""Heads of a block. Warp groups multiply 64, and are the faster ones even if there are 16; but not in steps of one
token, or of two with up to MANY_HEADS heads, for which there are hardly more tiles than blocks."""
MANY_HEADS = 64
MOST_TOKENS = (1, 2, 4, 8, 16, 32)
"""Of a step, at the ends of ranges in which a token is divided among as many blocks."""
MOST_CLUSTER, MOST_STAGES = 2, 2
"""Blocks of a cluster, and tiles on their way in a block. A block has a multiprocessor to itself, and larger clusters
don't all find room at once: 32 of four blocks took twice as long on an H100 as 64 of two."""


class Attend(NamedTuple):
    """How a token's heads are divided: heads of a block, blocks of a cluster, clusters, and tiles of a block's ring."""

    rows: int
    cluster: int
    parts: int
    stages: int

    @property
    def in_groups(self) -> bool:
        """Whether warp groups multiply, with four warps beside them that copy."""
        return self.rows == GROUP_ROWS


TAKES = (
    Condition(
        "latents in a multiple of 128 elements, and rope parts in one of 64 together with them, of up to 576",
        lambda use: (
            (use.number("weight", 1) or 1) % 128 == 0
            and (use.number("cache", 2) or 1) % 64 == 0
            and (use.number("cache", 2) or 577) <= 576
        ),
    ),
    Condition(
        "a cache of the query's type",
        lambda use: use.operands["cache"].type.dtype == use.operands["q"].type.dtype,
    ),
    Condition(
        "sinks of the query's type or float32",
        lambda use: (
            not use.has("sinks") or use.operands["sinks"].type.dtype in ("float32", use.operands["q"].type.dtype)
        ),
    ),
    Condition("a scale above 0", lambda use: real(use, "scale") > 0),
    Condition("Triton, which multiplies by the weight", lambda use: "triton" in use.target.kinds),
)


def ranges() -> Iterator[tuple[int, int | None]]:
    """The least and the most tokens of steps that are divided alike; None: any."""
    yield from zip((0, *(most + 1 for most in MOST_TOKENS)), (*MOST_TOKENS, None), strict=True)


def attend_of(use: Use, tokens: int | None) -> Attend:
    """For steps of up to so many tokens: as many blocks as leaves each a multiprocessor, but no more than tiles."""
    heads = known(use, "q", 2)
    is_large = tokens is None or tokens > 2 or (tokens == 2 and heads > MANY_HEADS)
    in_groups = is_large and _fits_groups(use)
    rows = GROUP_ROWS if in_groups else FEW_ROWS
    groups = -(-heads // rows)
    tiles = -(-known(use, "selected", 2) // TILE)
    blocks = min(tiles, NUM_SMS // ((tokens or NUM_SMS) * groups))
    blocks = 1 << max(blocks, 1).bit_length() - 1
    cluster = min(blocks, MOST_CLUSTER)
    stages = MOST_STAGES if in_groups else min(MOST_STAGES, -(-tiles // blocks))
    return Attend(rows, cluster, blocks // cluster, stages)


def _fits_groups(use: Use) -> bool:
    latent = known(use, "weight", 1)
    return latent in (128, 256, 512) and known(use, "cache", 2) - latent == 64


def workspace(use: Use, *, tokens: int | None) -> Expr:
    """The bytes of what launches leave for one another."""
    return attended_bytes(use, attend_of(use, tokens).parts, most_tokens=tokens)


def launches(use: Use, *, tokens: int | None) -> tuple[Launch, ...]:
    """`precast.paged_sparse_latent_attention` in steps of up to so many tokens."""
    how = attend_of(use, tokens)
    into, out_of = attend_products(use, how.parts, few=tokens is not None and tokens <= FEW_TOKENS)
    join = (joined(use, how.parts),) if how.parts > 1 else ()
    return (into, attend_launch(use, how), *join, out_of)


def attend_launch(use: Use, how: Attend) -> Launch:
    """Each token for itself."""
    sizes, has_sinks = sizes_of(use), use.has("sinks")
    file = "attend_groups" if how.in_groups else "attend"
    return Launch(
        kernel=f"precast.kernels.sparse_attention/{file}.cu:attend_selected",
        grid=(how.cluster * how.parts, -(-sizes.heads // how.rows), use.shape("q")[1]),
        args=(*attending(use, how.parts), Pointer("weight")),
        constants={
            "FLOAT16": sizes.dtype == "float16", "HEADS": sizes.heads, "NOPE": sizes.nope, "LATENT": sizes.latent,
            "ROPE": sizes.rope, "COUNT": known(use, "selected", 2), "PAGE_SIZE": sizes.page,
            "SCALE": real(use, "scale"), "SINKS": has_sinks,
            "SINKS_FLOAT32": has_sinks and use.width("sinks") == 4, "ROWS": how.rows, "CLUSTER": how.cluster,
            "STAGES": how.stages, "PARTS": how.parts > 1, "VALUE": sizes.value,
            "ASKS_FOR_WEIGHT": how.cluster > 1,
        },
        block=32 * (WARPS + 4 * how.in_groups),
        shared_bytes=shared_bytes(sizes.latent + sizes.rope, how),
        pdl=True,
    )  # fmt: skip


def shared_bytes(width: int, how: Attend) -> int:
    """What a block needs: its ring, queries and weights, and numbers of rows and of stages."""
    if how.in_groups:  # weights are where rope parts were
        return (how.stages + 1) * TILE * width * 2 + how.rows * 4 * (how.stages + 3) + how.stages * 24
    ring = how.stages * TILE * 16 * (width // 8 | 1)
    of_rows = width * 2 + TILE * 2 + 4 * (WARPS * 16 // how.rows + 1)
    return ring + how.rows * of_rows + how.stages * 8
