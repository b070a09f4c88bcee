"""The launches that compute rotary embeddings and their tables."""

from __future__ import annotations

from precast.ir.graph.symbols import ceildiv, mul
from precast.kernels.blocks import num_warps, power_of_two
from precast.kernels.records import Launch, Pointer, Stride
from precast.kernels.rows import known, real
from precast.kernels.use import Use

_TILE = 1024
"""Elements of heads that one program takes together."""
_TABLE_BLOCK = 256


def rotary(use: Use) -> tuple[Launch, ...]:
    """One launch."""
    tokens, heads = use.shape("x")[1:3]
    size, pairs, has_pdl = known(use, "x", -1), known(use, "cos", -1), use.target.capability >= (9, 0)
    block_h = max(_TILE // power_of_two(size), 1)
    if isinstance(heads, int):
        block_h = min(block_h, power_of_two(heads))
    return (
        Launch(
            kernel="precast.kernels.rotary.triton:rotary_kernel",
            grid=(tokens, ceildiv(heads, block_h)),
            args=(
                Pointer("out.0"),
                Pointer("x"),
                Pointer("cos"),
                Pointer("sin"),
                heads,
                *(Stride("x", axis) for axis in (1, 2, 3)),
                *(Stride(table, axis) for table in ("cos", "sin") for axis in (1, 2)),
            ),
            constants={
                "SIZE": size,
                "PAIRS": pairs,
                "INTERLEAVED": bool(use.constant("interleaved")),
                "BLOCK_H": block_h,
                "BLOCK_R": power_of_two(pairs),
                "BLOCK_REST": power_of_two(size - 2 * pairs),
                "PDL": has_pdl,
            },
            num_warps=num_warps(block_h * power_of_two(size)),
            pdl=has_pdl,
        ),
    )


def rotary_tables(use: Use) -> tuple[Launch, ...]:
    """One launch."""
    tokens, pairs = use.shape("positions")[1], known(use, "inv_freq", -1)
    has_pdl, is_each = use.target.capability >= (9, 0), len(use.shape("inv_freq")) == 3
    return (
        Launch(
            kernel="precast.kernels.rotary.triton:rotary_tables_kernel",
            grid=(ceildiv(mul(tokens, pairs), _TABLE_BLOCK),),
            args=(
                Pointer("out.0"),
                Pointer("out.1"),
                Pointer("positions"),
                Pointer("inv_freq"),
                tokens,
                real(use, "scale"),
                Stride("positions", 1),
                Stride("inv_freq", 1) if is_each else 0,
                Stride("inv_freq", 2 if is_each else 0),
            ),
            constants={"PAIRS": pairs, "BLOCK": _TABLE_BLOCK, "PDL": has_pdl},
            num_warps=num_warps(_TABLE_BLOCK),
            pdl=has_pdl,
        ),
    )
