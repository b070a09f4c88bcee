"""Layer norm in Triton: one launch, each row is read once."""

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.triton_chain import wait_for_previous


@triton.jit
def layer_norm_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    num_rows,
    inner,
    eps,
    x_stride_o,
    x_stride_i,
    x_stride_d,
    weight_stride,
    bias_stride,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a block of ROWS rows; `weight_ptr` and `bias_ptr` may be None."""
    d = tl.arange(0, BLOCK)[None, :]
    in_row = d < WIDTH
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + d * weight_stride, mask=in_row, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + d * bias_stride, mask=in_row, other=0.0).to(tl.float32)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    mask = (row < num_rows) & in_row
    outer = (row // inner).to(tl.int64)
    within = (row % inner).to(tl.int64)
    wait_for_previous(PDL)

    given = tl.load(x_ptr + (outer * x_stride_o + within * x_stride_i) + d * x_stride_d, mask=mask, other=0.0)
    x = given.to(tl.float32)
    centred = tl.where(in_row, x - (tl.sum(x, axis=1) / WIDTH)[:, None], 0.0)
    y = centred * tl.rsqrt(tl.sum(centred * centred, axis=1) / WIDTH + eps)[:, None]
    if weight_ptr is not None:
        y = y * weight
    if bias_ptr is not None:
        y = y + bias
    tl.store(y_ptr + row.to(tl.int64) * WIDTH + d, y.to(given.dtype), mask=mask)
