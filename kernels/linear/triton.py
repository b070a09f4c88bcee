"""Linear layers with few outputs in Triton: one launch, each row of the input is read once."""

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.triton_chain import wait_for_previous


@triton.jit
def few_outputs_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    num_rows,
    inner,
    x_stride_o,
    x_stride_i,
    x_stride_k,
    weight_stride_n,
    weight_stride_k,
    bias_stride,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[row, n] = sum over k of x[row, k] * weight[n, k], + bias[n], in float32.

    One program ROWS rows of x and all OUTPUTS of them, at most PLACES, BLOCK inputs at a time; `bias_ptr` may be None.
    A row's sum does not depend on the others.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, PLACES)
    has_row, has_output = row < num_rows, n < OUTPUTS
    x_ptr += ((row // inner).to(tl.int64) * x_stride_o + (row % inner).to(tl.int64) * x_stride_i)[:, None]
    weight_ptr += n.to(tl.int64)[:, None] * weight_stride_n
    wait_for_previous(PDL)

    products = tl.zeros((ROWS, PLACES, BLOCK), tl.float32)
    for start in range(0, INPUTS, BLOCK):
        k = start + tl.arange(0, BLOCK)[None, :]
        x = tl.load(x_ptr + k * x_stride_k, mask=has_row[:, None] & (k < INPUTS), other=0.0)
        weight = tl.load(weight_ptr + k * weight_stride_k, mask=has_output[:, None] & (k < INPUTS), other=0.0)
        products += x.to(tl.float32)[:, None, :] * weight.to(tl.float32)[None, :, :]
    y = tl.sum(products, axis=2)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n * bias_stride, mask=has_output, other=0.0).to(tl.float32)[None, :]
    target = y_ptr + row.to(tl.int64)[:, None] * OUTPUTS + n[None, :]
    tl.store(target, y.to(y_ptr.dtype.element_ty), mask=has_row[:, None] & has_output[None, :])
