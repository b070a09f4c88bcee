"""Root mean square norms in Triton, with the sum and the norm before it: one launch, each row is read once."""

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.triton_chain import wait_for_previous


@triton.jit
def scale_of(pointers, mask, OFFSET: tl.constexpr, CAST_BEFORE_SCALE: tl.constexpr):  # type: ignore[no-untyped-def]
    """`offset + weight` in float32, rounded to the weight's dtype where the reference adds in that."""
    weight = tl.load(pointers, mask=mask, other=0.0)
    scale = weight.to(tl.float32)
    if OFFSET != 0.0:
        scale += OFFSET
        if CAST_BEFORE_SCALE:
            scale = scale.to(weight.dtype).to(tl.float32)
    return scale


@triton.jit
def scaled(normed, scale, CAST_BEFORE_SCALE: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """`scale * normed` in `dtype`, from float32; `normed` is rounded first if it is `cast_before_scale`."""
    if CAST_BEFORE_SCALE:
        normed = normed.to(dtype).to(tl.float32)
    return (scale * normed).to(dtype)


@triton.jit
def normed_rows(x, scale, eps, WIDTH: tl.constexpr, CAST_BEFORE_SCALE: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """The rows of `x`, float32 and 0 from WIDTH on, over their root mean squares; `scale` None for no weight."""
    normed = x * tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)[:, None]
    return normed.to(dtype) if scale is None else scaled(normed, scale, CAST_BEFORE_SCALE, dtype)


@triton.jit
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    sum_ptr,
    x_ptr,
    residual_ptr,
    inner_weight_ptr,
    weight_ptr,
    num_rows,
    inner,
    eps,
    x_stride_o,
    x_stride_i,
    x_stride_d,
    residual_stride_o,
    residual_stride_i,
    residual_stride_d,
    inner_weight_stride,
    weight_stride,
    OFFSET: tl.constexpr,
    CAST_BEFORE_SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = rms_norm(x), or of the sum of `residual` with x, or with rms_norm(x, inner_weight); the sum is kept.

    One program a block of ROWS rows. `residual_ptr` with `sum_ptr`, `inner_weight_ptr` and `weight_ptr` may be None.
    """
    d = tl.arange(0, BLOCK)[None, :]
    in_row = d < WIDTH
    scale = None
    if weight_ptr is not None:
        scale = scale_of(weight_ptr + d * weight_stride, in_row, OFFSET, CAST_BEFORE_SCALE)
    if inner_weight_ptr is not None:
        inner_scale = scale_of(inner_weight_ptr + d * inner_weight_stride, in_row, OFFSET, CAST_BEFORE_SCALE)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    mask = (row < num_rows) & in_row
    outer = (row // inner).to(tl.int64)
    within = (row % inner).to(tl.int64)
    wait_for_previous(PDL)

    x = tl.load(x_ptr + (outer * x_stride_o + within * x_stride_i) + d * x_stride_d, mask=mask, other=0.0)
    dtype: tl.constexpr = x.dtype
    target = row.to(tl.int64) * WIDTH + d
    if residual_ptr is not None:
        source = residual_ptr + (outer * residual_stride_o + within * residual_stride_i) + d * residual_stride_d
        residual = tl.load(source, mask=mask, other=0.0)
        if inner_weight_ptr is not None:
            x = normed_rows(x.to(tl.float32), inner_scale, eps, WIDTH, CAST_BEFORE_SCALE, dtype)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(sum_ptr + target, x, mask=mask)
    tl.store(y_ptr + target, normed_rows(x.to(tl.float32), scale, eps, WIDTH, CAST_BEFORE_SCALE, dtype), mask=mask)
