"""Rows of a rank's part of a table, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.triton_chain import wait_for_previous


@triton.jit
def part_rows_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    x_ptr,
    rows_ptr,
    num_rows,
    start,
    x_stride_r,
    x_stride_d,
    rows_stride,
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a part of a row of y: that of x [num_rows, WIDTH], counted from `start` on, which `rows` names, times
    SCALE in x's dtype; 0 where x has no such row."""
    target = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = d < WIDTH
    wait_for_previous(PDL)

    row = tl.load(rows_ptr + target * rows_stride).to(tl.int64) - start
    inside = (row >= 0) & (row < num_rows)
    x = tl.load(x_ptr + row * x_stride_r + d.to(tl.int64) * x_stride_d, mask=mask & inside, other=0.0)
    if SCALE != 1.0:
        scale = tl.full([], SCALE, tl.float32).to(x.dtype).to(tl.float32)
        x = (x.to(tl.float32) * scale).to(x.dtype)
    tl.store(y_ptr + target * WIDTH + d, x, mask=mask)
