"""Matrices as values of 8 bits, in Triton, for weights that are quantised while they are read: see `quantise`."""

# To pyright a kernel that is called by another returns nothing.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.rounded.few_bits import in_few_bits


@triton.jit
def quantise_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, num_rows, num_columns, block_rows, block_columns,
    IS_VALUES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One block of `x` [num_rows, num_columns], contiguous: its values, or the scale that they have in common.

    Magnitudes are compared as integers, whose order is the same, and of which NaN is the largest.
    """
    across = tl.cdiv(num_columns, block_columns)
    first_row = tl.program_id(0) // across * block_rows
    first_column = tl.program_id(0) % across * block_columns
    last_row = tl.minimum(first_row + block_rows, num_rows)
    last_column = tl.minimum(first_column + block_columns, num_columns)
    inside_row, inside_column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    largest = tl.zeros((ROWS, COLUMNS), tl.int32)
    for row_0 in range(first_row, last_row, ROWS):
        row = (row_0 + inside_row).to(tl.int64)
        for column_0 in range(first_column, last_column, COLUMNS):
            column = column_0 + inside_column
            mask = (row < last_row) & (column < last_column)
            x = tl.load(x_ptr + row * num_columns + column, mask=mask, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    most = tl.max(tl.max(largest, 1), 0).to(tl.float32, bitcast=True) + tl.zeros((1, 1), tl.float32)
    scale = tl.div_rn(most, tl.full((1, 1), 448.0, tl.float32))
    scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)
    if not IS_VALUES:
        tl.store(out_ptr + tl.program_id(0) + tl.zeros((1, 1), tl.int32), scale)
    else:
        for row_0 in range(first_row, last_row, ROWS):
            row = (row_0 + inside_row).to(tl.int64)
            for column_0 in range(first_column, last_column, COLUMNS):
                column = column_0 + inside_column
                mask = (row < last_row) & (column < last_column)
                place = row * num_columns + column
                x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
                values = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
                tl.store(out_ptr + place, in_few_bits(values, "fp8", out_ptr.dtype.element_ty), mask=mask)
