"""The kernels of this room: a copy between tensors with any strides, words of four bits in another order, elements by
their numbers in a row, softmax and the largest of rows, and products of matrices. Offsets have 64 bits.

They are simple, and made for shapes of which no model has many.
"""

# To pyright a kernel that is called by another returns nothing.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.sparse_attention.triton_select import in_order
from precast.kernels.triton_chain import stop_unless, wait_for_previous


@triton.jit
def copy_kernel(  # type: ignore[no-untyped-def]
    x, out, num_rows, num_columns, size_a, size_b, size_c,
    x_a, x_b, x_c, x_column, out_a, out_b, out_c, out_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    mask = (row < num_rows) & (column < num_columns)
    c = row % size_c
    b = row // size_c % size_b
    a = row // size_c // size_b % size_a
    wait_for_previous(PDL)
    values = tl.load(x + a * x_a + b * x_b + c * x_c + column * x_column, mask=mask)
    tl.store(out + a * out_a + b * out_b + c * out_c + column * out_column, values, mask=mask)


@triton.jit
def repack_kernel(  # type: ignore[no-untyped-def]
    x, out, num_rows, num_columns, x_row, x_word, x_column, out_row, out_word, out_column,
    EXCHANGED: tl.constexpr, IN_ORDER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """AWQ's words of four bits as packed4's: of values eight words of eight inputs each as those of eight outputs, of
    zeros each for itself. Of AWQ's word half byte p is output 2 (p % 4) + p // 4; IN_ORDER: it is number p."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    mask = (row < num_rows) & (column < num_columns)
    x += row * x_row + column * x_column
    out += row * out_row + column * out_column
    w0 = tl.load(x, mask=mask, other=0)
    if EXCHANGED:
        w1 = tl.load(x + x_word, mask=mask, other=0)
        w2 = tl.load(x + 2 * x_word, mask=mask, other=0)
        w3 = tl.load(x + 3 * x_word, mask=mask, other=0)
        w4 = tl.load(x + 4 * x_word, mask=mask, other=0)
        w5 = tl.load(x + 5 * x_word, mask=mask, other=0)
        w6 = tl.load(x + 6 * x_word, mask=mask, other=0)
        w7 = tl.load(x + 7 * x_word, mask=mask, other=0)
        # Half byte p of word j for half byte j of word p: by halves, quarters and eighths.
        w0, w4 = _exchanged(w0, w4, 16, 0x0000FFFF)
        w1, w5 = _exchanged(w1, w5, 16, 0x0000FFFF)
        w2, w6 = _exchanged(w2, w6, 16, 0x0000FFFF)
        w3, w7 = _exchanged(w3, w7, 16, 0x0000FFFF)
        w0, w2 = _exchanged(w0, w2, 8, 0x00FF00FF)
        w1, w3 = _exchanged(w1, w3, 8, 0x00FF00FF)
        w4, w6 = _exchanged(w4, w6, 8, 0x00FF00FF)
        w5, w7 = _exchanged(w5, w7, 8, 0x00FF00FF)
        w0, w1 = _exchanged(w0, w1, 4, 0x0F0F0F0F)
        w2, w3 = _exchanged(w2, w3, 4, 0x0F0F0F0F)
        w4, w5 = _exchanged(w4, w5, 4, 0x0F0F0F0F)
        w6, w7 = _exchanged(w6, w7, 4, 0x0F0F0F0F)
        if IN_ORDER:
            n1, n2, n3, n4, n5, n6 = w1, w2, w3, w4, w5, w6
        else:
            n1, n2, n3, n4, n5, n6 = w4, w1, w5, w2, w6, w3
        tl.store(out, w0, mask=mask)
        tl.store(out + out_word, n1, mask=mask)
        tl.store(out + 2 * out_word, n2, mask=mask)
        tl.store(out + 3 * out_word, n3, mask=mask)
        tl.store(out + 4 * out_word, n4, mask=mask)
        tl.store(out + 5 * out_word, n5, mask=mask)
        tl.store(out + 6 * out_word, n6, mask=mask)
        tl.store(out + 7 * out_word, w7, mask=mask)
    else:
        moved = ((w0 >> 8) ^ w0) & 0x0000FF00
        w0 = w0 ^ moved ^ (moved << 8)
        moved = ((w0 >> 4) ^ w0) & 0x00F000F0
        tl.store(out, w0 ^ moved ^ (moved << 4), mask=mask)


@triton.jit
def _exchanged(low, high, BITS: tl.constexpr, MASK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The upper bits of MASK's fields of `low` for the lower ones of `high`."""
    moved = ((low >> BITS) ^ high) & MASK
    return low ^ (moved << BITS), high ^ moved


@triton.jit
def gather_kernel(  # type: ignore[no-untyped-def]
    x, index, out, num_rows, num_columns, num_taken, x_inner_size, index_inner_size,
    x_outer, x_inner, x_column, index_outer, index_inner, index_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[row, i] = x[row, index[row, i]]."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    i = (tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    mask = (row < num_rows) & (i < num_taken)
    wait_for_previous(PDL)
    place = row // index_inner_size * index_outer + row % index_inner_size * index_inner + i * index_column
    column = tl.load(index + place, mask=mask, other=0).to(tl.int64)
    is_there = (column >= 0) & (column < num_columns)
    stop_unless(tl.min(tl.min((is_there | (mask == 0)).to(tl.int32), 1), 0) == 1)
    place = row // x_inner_size * x_outer + row % x_inner_size * x_inner + column * x_column
    tl.store(out + row * num_taken + i, tl.load(x + place, mask=mask & is_there, other=0), mask=mask)


@triton.jit
def softmax_kernel(  # type: ignore[no-untyped-def]
    x, out, num_rows, num_columns, inner_size, x_outer, x_inner, x_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Softmax of whole rows, in float32; what is given is rounded to the result's type first."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, COLUMNS).to(tl.int64)[None, :]
    is_column = column < num_columns
    wait_for_previous(PDL)
    place = row // inner_size * x_outer + row % inner_size * x_inner + column * x_column
    values = tl.load(x + place, mask=(row < num_rows) & is_column, other=0.0)
    values = tl.where(is_column, values.to(out.dtype.element_ty).to(tl.float32), float("-inf"))
    shares = tl.exp(values - tl.max(values, 1)[:, None])
    shares = shares / tl.sum(shares, 1)[:, None]
    tl.store(out + row * num_columns + column, shares.to(out.dtype.element_ty), mask=(row < num_rows) & is_column)


@triton.jit
def topk_kernel(  # type: ignore[no-untyped-def]
    x, out, numbers, num_rows, num_columns, inner_size, x_outer, x_inner, x_column,
    COUNT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The COUNT largest of whole rows in descending order, and their numbers: of equal ones the first, and NaN is the
    largest."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (row < num_rows) & (column < num_columns)
    wait_for_previous(PDL)
    place = row // inner_size * x_outer + row % inner_size * x_inner + column.to(tl.int64) * x_column
    values = tl.load(x + place, mask=mask, other=0.0)
    # Below all numbers, which are integers of the same order.
    left = tl.where(column < num_columns, in_order(values.to(tl.float32)), -(1 << 31))
    for turn in range(0, COUNT):
        number = tl.min(tl.where(left == tl.max(left, 1)[:, None], column, COLUMNS), 1)[:, None]
        is_own = column == number
        left = tl.where(is_own, -(1 << 31), left)
        target = row * COUNT + turn
        tl.store(out + target + column * 0, values, mask=mask & is_own)
        tl.store(numbers + target, number.to(tl.int64), mask=row < num_rows)


@triton.jit
def matmul_kernel(  # type: ignore[no-untyped-def]
    a, b, out, num_rows, num_columns, num_inner, size_batch,
    a_outer, a_batch, a_row, a_inner, b_outer, b_batch, b_inner, b_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    num_tiles = tl.cdiv(num_rows, ROWS)
    matrix = tl.program_id(0).to(tl.int64) // num_tiles
    row = (tl.program_id(0) % num_tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
    a += matrix // size_batch * a_outer + matrix % size_batch * a_batch + row * a_row
    b += matrix // size_batch * b_outer + matrix % size_batch * b_batch + column * b_column
    wait_for_previous(PDL)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, num_inner, INNER):
        inner = (begin + tl.arange(0, INNER)).to(tl.int64)
        left = tl.load(a + inner[None, :] * a_inner, mask=(row < num_rows) & (inner < num_inner)[None, :], other=0)
        right = tl.load(
            b + inner[:, None] * b_inner, mask=(column < num_columns) & (inner < num_inner)[:, None], other=0
        )
        total = tl.dot(left, right, total, input_precision="ieee")
    mask = (row < num_rows) & (column < num_columns)
    tl.store(out + (matrix * num_rows + row) * num_columns + column, total.to(out.dtype.element_ty), mask=mask)
