"""The launch that computes a gated activation."""

from __future__ import annotations

from precast.ir.graph.symbols import mul
from precast.kernels.blocks import num_warps, power_of_two
from precast.kernels.records import Launch, Pointer
from precast.kernels.rows import known, rows_of
from precast.kernels.use import Use

_BLOCK = 1024


def gated_activation(use: Use) -> tuple[Launch, ...]:
    """One launch."""
    rows, has_pdl = rows_of(use, "x"), use.target.capability >= (9, 0)
    width = known(use, "x", -1) // 2
    block = min(power_of_two(width), _BLOCK)
    return (
        Launch(
            kernel="precast.kernels.gated_activation.triton:gated_activation_kernel",
            grid=(mul(rows.total, -(-width // block)),),
            args=(Pointer("out.0"), Pointer("x"), rows.inner, *rows.strides),
            constants={"WIDTH": width, "BLOCK": block, "KIND": str(use.constant("kind")), "PDL": has_pdl},
            num_warps=num_warps(block),
            pdl=has_pdl,
        ),
    )
