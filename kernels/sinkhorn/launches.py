"""The launch of Sinkhorn's iterations, and the sizes of its tiles. No torch."""

from __future__ import annotations

from precast.ir.graph.symbols import ceildiv
from precast.kernels.blocks import num_warps, power_of_two
from precast.kernels.records import Condition, Launch, Pointer
from precast.kernels.rows import overlaps, real, rows_of
from precast.kernels.use import Use

MAX_SIZE = 64
"""Rows of a matrix that one program holds."""
_TILE = 512
"""Elements of small matrices that one program takes together."""
IS_SMALL = Condition(f"matrices of at most {MAX_SIZE} rows", lambda use: _number(use, "size") <= MAX_SIZE)


def sinkhorn(use: Use) -> tuple[Launch, ...]:
    """One launch."""
    rows, size = rows_of(use, "x"), _number(use, "size")
    block = power_of_two(size)
    count = max(1, _TILE // (block * block))
    return (
        Launch(
            kernel="precast.kernels.sinkhorn.triton:sinkhorn_kernel",
            grid=(ceildiv(rows.total, count),),
            args=(Pointer("out.0"), Pointer("x"), rows.total, rows.inner, *rows.strides),
            constants={
                "EPS": real(use, "eps"),
                "SIZE": size,
                "ITERATIONS": _number(use, "iterations"),
                "ROWS": count,
                "BLOCK": block,
                "PDL": overlaps(use),
            },
            num_warps=num_warps(count * block * block),
            pdl=overlaps(use),
        ),
    )


def _number(use: Use, name: str) -> int:
    value = use.constant(name)
    assert isinstance(value, int), f"{name} is a number"
    return value
