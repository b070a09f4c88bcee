"""The experts of a rank by their numbers there, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.triton_chain import wait_for_previous


@triton.jit
def less_kernel(  # type: ignore[no-untyped-def]
    y_ptr, x_ptr, number, num_rows, x_stride_r, x_stride_k, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """y = x [num_rows, WIDTH] - number, all of integers; y in row-major order. One program BLOCK elements."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, column = i // WIDTH, i % WIDTH
    mask = row < num_rows
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row * x_stride_r + column * x_stride_k, mask=mask, other=0)
    tl.store(y_ptr + i, x - number, mask=mask)
