"""The launch that computes a layer norm."""

from __future__ import annotations

from precast.ir.graph.symbols import ceildiv
from precast.kernels.records import Launch, Pointer, Stride
from precast.kernels.rows import overlaps, real, rows_of, tile_of
from precast.kernels.use import Use


def layer_norm(use: Use) -> tuple[Launch, ...]:
    """One launch."""
    rows, tile, has_pdl = rows_of(use, "x"), tile_of(use, "x"), overlaps(use, "weight", "bias")
    given = [name if use.has(name) else None for name in ("weight", "bias")]
    return (
        Launch(
            kernel="precast.kernels.layer_norm.triton:layer_norm_kernel",
            grid=(ceildiv(rows.total, tile.rows),),
            args=(
                Pointer("out.0"),
                Pointer("x"),
                *(None if name is None else Pointer(name) for name in given),
                rows.total,
                rows.inner,
                real(use, "eps"),
                *rows.strides,
                *(0 if name is None else Stride(name, 0) for name in given),
            ),
            constants={"WIDTH": tile.width, "ROWS": tile.rows, "BLOCK": tile.block, "PDL": has_pdl},
            num_warps=tile.num_warps,
            pdl=has_pdl,
        ),
    )
