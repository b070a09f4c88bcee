"""Sinkhorn's iterations in Triton: matrices stay in registers from the first iteration to the last."""

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.triton_chain import wait_for_previous


@triton.jit
def sinkhorn_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    x_ptr,
    num_rows,
    inner,
    x_stride_outer,
    x_stride_inner,
    x_stride_d,
    EPS: tl.constexpr,
    SIZE: tl.constexpr,
    ITERATIONS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS matrices [SIZE, SIZE], each a row of `x`; BLOCK is a power of two that has room for SIZE."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None, None]
    i = tl.arange(0, BLOCK)[None, :, None]
    j = tl.arange(0, BLOCK)[None, None, :]
    exists = (i < SIZE) & (j < SIZE)
    mask = (row < num_rows) & exists
    place = (i * SIZE + j).to(tl.int64)
    wait_for_previous(PDL)
    offsets = row // inner * x_stride_outer + row % inner * x_stride_inner + place * x_stride_d
    y = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    # What there is no matrix for stays zero, also where EPS is.
    y = y / tl.where(mask, tl.sum(y, 1)[:, None, :] + EPS, 1.0)
    for _ in range(1, ITERATIONS):
        y = y / tl.where(mask, tl.sum(y, 2)[:, :, None] + EPS, 1.0)
        y = y / tl.where(mask, tl.sum(y, 1)[:, None, :] + EPS, 1.0)
    tl.store(y_ptr + row * (SIZE * SIZE) + place, y.to(y_ptr.dtype.element_ty), mask=mask)
