"""The launch that computes a root mean square norm, with the sum and the norm before it."""

from __future__ import annotations

from precast.ir.graph.symbols import ceildiv
from precast.kernels.records import Launch, Pointer, Stride
from precast.kernels.rows import overlaps, real, rows_of, tile_of
from precast.kernels.use import Use


def rms_norm(use: Use) -> tuple[Launch, ...]:
    """One launch for `rms_norm`, `residual_rms_norm` and `norm_residual_norm`."""
    rows, tile, has_pdl = rows_of(use, "x"), tile_of(use, "x"), overlaps(use, "inner_weight", "weight")
    has_residual = use.has("residual")
    weights = [name if use.has(name) else None for name in ("inner_weight", "weight")]
    return (
        Launch(
            kernel="precast.kernels.rms_norm.triton:rms_norm_kernel",
            grid=(ceildiv(rows.total, tile.rows),),
            args=(
                Pointer("out.0"),
                Pointer("out.1") if has_residual else None,
                Pointer("x"),
                Pointer("residual") if has_residual else None,
                *(None if name is None else Pointer(name) for name in weights),
                rows.total,
                rows.inner,
                real(use, "eps"),
                *rows.strides,
                *(rows_of(use, "residual").strides if has_residual else (0, 0, 0)),
                *(0 if name is None else Stride(name, 0) for name in weights),
            ),
            constants={
                "OFFSET": real(use, "offset"),
                "CAST_BEFORE_SCALE": bool(use.constant("cast_before_scale")),
                "WIDTH": tile.width,
                "ROWS": tile.rows,
                "BLOCK": tile.block,
                "PDL": has_pdl,
            },
            num_warps=tile.num_warps,
            pdl=has_pdl,
        ),
    )
