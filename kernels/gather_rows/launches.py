"""The launch that gathers rows."""

from __future__ import annotations

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import ceildiv
from precast.kernels.blocks import num_warps, power_of_two
from precast.kernels.records import Launch, Pointer, Stride
from precast.kernels.rows import known, overlaps, real
from precast.kernels.use import Use

_BLOCK = 1024
"""Elements that one program copies: few rows are copied by many programs."""


def gather_rows(use: Use) -> tuple[Launch, ...]:
    """One launch."""
    return (gathered(use, "x", "rows"),)


def embedding(use: Use) -> tuple[Launch, ...]:
    """One launch."""
    return (gathered(use, "weight", "ids", scale=real(use, "scale") if use.constant("scale") is not None else 1.0),)


def gathered(use: Use, source: str, rows: str, scale: float = 1.0) -> Launch:
    """Rows of the last two axes of `source` by the last one of `rows`, before which all are of length 1."""
    width, has_pdl = known(use, source, -1), overlaps(use)
    axes, places = len(use.shape(source)), len(use.shape(rows))
    count: Expr = use.shape(rows)[-1]
    block = min(_BLOCK, power_of_two(width))
    return Launch(
        kernel="precast.kernels.gather_rows.triton:gather_rows_kernel",
        grid=(count, ceildiv(width, block)),
        args=(
            Pointer("out.0"), Pointer(source), Pointer(rows), use.shape(source)[-2], Stride(source, axes - 2),
            Stride(source, axes - 1), Stride(rows, places - 1),
        ),
        constants={"SCALE": scale, "WIDTH": width, "BLOCK": block, "PDL": has_pdl},
        num_warps=num_warps(block),
        pdl=has_pdl,
    )  # fmt: skip
