"""The launch that looks up rows of a table in few bits, or of a rank's part of one."""

from __future__ import annotations

from precast.ir.graph.symbols import ceildiv
from precast.kernels.blocks import num_warps, power_of_two
from precast.kernels.embedding.part_launches import first_row
from precast.kernels.records import Launch, Pointer, Stride
from precast.kernels.rows import known, overlaps, real
from precast.kernels.use import Use

_BLOCK = 1024
"""Elements that one program makes: few rows are made by many programs."""


def quantised_embedding(use: Use) -> tuple[Launch, ...]:
    """One launch, which stops where an id is that of no row."""
    return (_rows(use, is_part=False),)


def quantised_sharded_embedding(use: Use) -> tuple[Launch, ...]:
    """One launch."""
    return (_rows(use, is_part=True),)


def _rows(use: Use, *, is_part: bool) -> Launch:
    width, has_pdl, places = known(use, "weight", -1), overlaps(use), len(use.shape("ids"))
    block = min(_BLOCK, power_of_two(width))
    # Where all share a scale, tables of other sizes have the same kernel.
    rows, columns = (
        0 if use.number("scales", axis) == 1 else size for axis, size in enumerate(use.integers("block") or ())
    )
    return Launch(
        kernel="precast.kernels.embedding.quantised_triton:quantised_rows_kernel",
        grid=(use.shape("ids")[-1], ceildiv(width, block)),
        args=(
            Pointer("out.0"), Pointer("weight"), Pointer("scales"), Pointer("ids"), use.shape("weight")[0],
            first_row(use) if is_part else 0, Stride("weight", 0), Stride("weight", 1), Stride("scales", 0),
            Stride("scales", 1), Stride("ids", places - 1),
        ),
        constants={
            "SCALE": real(use, "scale") if use.constant("scale") is not None else 1.0, "ROWS": rows,
            "COLUMNS": columns, "IS_PART": is_part, "WIDTH": width, "BLOCK": block, "PDL": has_pdl,
        },
        num_warps=num_warps(block),
        pdl=has_pdl,
    )  # fmt: skip
