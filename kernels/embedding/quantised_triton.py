"""Rows of a table in few bits, or of a rank's part of one, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.triton_chain import stop_unless, wait_for_previous


@triton.jit
def quantised_rows_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    x_ptr,
    scales_ptr,
    rows_ptr,
    num_rows,
    start,
    x_stride_r,
    x_stride_d,
    scales_stride_r,
    scales_stride_d,
    rows_stride,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_PART: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a part of a row of y: that of x [num_rows, WIDTH], float8, counted from `start` on, which `rows`
    names, times the scales of its blocks of ROWS and COLUMNS, in y's dtype, and times SCALE in that dtype.

    ROWS 0: all rows share a scale; COLUMNS likewise. Where x has no such row the program stops, or of a PART it is 0.
    """
    target = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = d < WIDTH
    wait_for_previous(PDL)

    row = tl.load(rows_ptr + target * rows_stride).to(tl.int64) - start
    inside = (row >= 0) & (row < num_rows)
    if not IS_PART:
        stop_unless(inside)
    x = tl.load(x_ptr + row * x_stride_r + d.to(tl.int64) * x_stride_d, mask=mask & inside, other=0.0)
    if ROWS:
        scales_ptr += row // ROWS * scales_stride_r
    if COLUMNS:
        of = tl.load(scales_ptr + (d // COLUMNS).to(tl.int64) * scales_stride_d, mask=mask & inside, other=0.0)
    else:
        of = tl.load(scales_ptr, mask=inside, other=0.0)
    y = (x.to(tl.float32) * of.to(tl.float32)).to(y_ptr.dtype.element_ty)
    if SCALE != 1.0:
        scale = tl.full([], SCALE, tl.float32).to(y.dtype).to(tl.float32)
        y = (y.to(tl.float32) * scale).to(y.dtype)
    tl.store(y_ptr + target * WIDTH + d, y, mask=mask)
