"""Norms and gates in Triton that round their rows to few bits as they write them: one launch, each row is read once."""

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.gated_activation.triton import activated
from precast.kernels.rms_norm.triton import normed_rows, scale_of
from precast.kernels.rounded.few_bits import divided, divided_groups, in_few_bits, scales_of_groups, store_where_made
from precast.kernels.triton_chain import wait_for_previous


@triton.jit
def _store_in_few_bits(  # type: ignore[no-untyped-def]
    values_ptr,
    scales_ptr,
    input_scale_ptr,
    y,
    row,
    first,
    is_row,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    POWERS_OF_TWO: tl.constexpr,
):
    """`y` [ROWS, BLOCK], float32 and 0 beyond WIDTH, as values of few bits and their scales: the columns from `first`
    on of the rows `row` [ROWS, 1], without those that are none.

    GROUP neighbours have a scale, any number or one of POWERS_OF_TWO; 0: all have the one of `input_scale_ptr`, which
    each row gets.
    """
    ROWS: tl.constexpr = y.shape[0]
    BLOCK: tl.constexpr = y.shape[1]
    column = first + tl.arange(0, BLOCK)[None, :]
    if GROUP:
        COUNT: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
        GROUPS: tl.constexpr = BLOCK // GROUP
        groups = tl.reshape(y, (ROWS * GROUPS, GROUP))
        scales = scales_of_groups(groups, KIND, POWERS_OF_TWO)
        y = tl.reshape(divided_groups(groups, scales), (ROWS, BLOCK))
        group = first // GROUP + tl.arange(0, GROUPS)[None, :]
        place, is_group = row * COUNT + group, is_row & (group < COUNT)
        store_where_made(scales_ptr + tl.reshape(place, scales.shape), scales, tl.reshape(is_group, scales.shape))
    else:
        scale = tl.load(input_scale_ptr).to(tl.float32)
        y = divided(y, tl.full((1, 1), 1.0, tl.float32) * scale, True)
        tl.store(scales_ptr + row, tl.full((ROWS, 1), 1.0, tl.float32) * scale, mask=is_row & (first == 0))
    few = in_few_bits(y, KIND, values_ptr.dtype.element_ty)
    tl.store(values_ptr + row * WIDTH + column, few, mask=is_row & (column < WIDTH))


@triton.jit
def rounded_norm_kernel(  # type: ignore[no-untyped-def]
    values_ptr,
    scales_ptr,
    sum_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    input_scale_ptr,
    num_rows,
    inner,
    eps,
    x_stride_o,
    x_stride_i,
    x_stride_d,
    residual_stride_o,
    residual_stride_i,
    residual_stride_d,
    weight_stride,
    OFFSET: tl.constexpr,
    CAST_BEFORE_SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    POWERS_OF_TWO: tl.constexpr,
    PDL: tl.constexpr,
):
    """rms_norm(x), or of the sum with `residual`, which is kept, in few bits.

    One program a block of ROWS rows. `residual_ptr` with `sum_ptr`, and `weight_ptr` may be None.
    """
    d = tl.arange(0, BLOCK)[None, :]
    in_row = d < WIDTH
    scale = None
    if weight_ptr is not None:
        scale = scale_of(weight_ptr + d * weight_stride, in_row, OFFSET, CAST_BEFORE_SCALE)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    is_row = row < num_rows
    mask = is_row & in_row
    outer = (row // inner).to(tl.int64)
    within = (row % inner).to(tl.int64)
    wait_for_previous(PDL)

    x = tl.load(x_ptr + (outer * x_stride_o + within * x_stride_i) + d * x_stride_d, mask=mask, other=0.0)
    dtype: tl.constexpr = x.dtype
    row = row.to(tl.int64)
    if residual_ptr is not None:
        source = residual_ptr + (outer * residual_stride_o + within * residual_stride_i) + d * residual_stride_d
        residual = tl.load(source, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(sum_ptr + row * WIDTH + d, x, mask=mask)
    y = normed_rows(x.to(tl.float32), scale, eps, WIDTH, CAST_BEFORE_SCALE, dtype).to(tl.float32)
    _store_in_few_bits(values_ptr, scales_ptr, input_scale_ptr, y, row, 0, is_row, WIDTH, KIND, GROUP, POWERS_OF_TWO)


@triton.jit
def rounded_gate_kernel(  # type: ignore[no-untyped-def]
    values_ptr,
    scales_ptr,
    x_ptr,
    input_scale_ptr,
    inner,
    x_stride_o,
    x_stride_i,
    x_stride_f,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    POWERS_OF_TWO: tl.constexpr,
    PDL: tl.constexpr,
):
    """The activated first half of a row times the second, in few bits. One program a block of BLOCK of the WIDTH
    elements of a row of the result, all of them where they have one scale."""
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // BLOCKS
    first = tl.program_id(0) % BLOCKS * BLOCK
    f = (first + tl.arange(0, BLOCK))[None, :]
    x_ptr += (row // inner).to(tl.int64) * x_stride_o + (row % inner).to(tl.int64) * x_stride_i
    wait_for_previous(PDL)

    gate = tl.load(x_ptr + f * x_stride_f, mask=f < WIDTH, other=0.0)
    value = tl.load(x_ptr + (WIDTH + f) * x_stride_f, mask=f < WIDTH, other=0.0)
    y = activated(gate.to(tl.float32), ACTIVATION) * value.to(tl.float32)
    y = y.to(gate.dtype).to(tl.float32)
    rows = tl.full((1, 1), 1, tl.int64) * row
    _store_in_few_bits(
        values_ptr, scales_ptr, input_scale_ptr, y, rows, first, rows >= 0, WIDTH, KIND, GROUP, POWERS_OF_TWO
    )
