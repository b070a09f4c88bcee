"""Weights in few bits made whole in Triton, for products with many rows: values in the input's dtype.

`words_kernel` makes all values of a word where it is read, and stores them side by side. `values_kernel` makes them one
by one, where the inputs of a word have groups of their own, or where it has but one.
"""

# To pyright a kernel that is called by another returns nothing.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.quantised_linear.triton import points_of, scale_of, value_of
from precast.kernels.triton_chain import wait_for_previous


@triton.jit
def _scaled_by_all(scale, global_ptr, n, outputs, GLOBAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scales [N, K] times those of all, or divided by them."""
    if GLOBAL != "none":
        of_all = global_ptr + (n if GLOBAL == "rows" or GLOBAL == "rows_divided" else n * 0)
        whole = tl.load(of_all, mask=n < outputs, other=1.0).to(tl.float32)
        if GLOBAL == "one_divided" or GLOBAL == "rows_divided":
            scale = tl.div_rn(scale, tl.broadcast_to(whole, scale.shape))
        else:
            scale *= whole
    return scale


@triton.jit
def _number(words, points, scale, j: tl.constexpr, FORMAT: tl.constexpr, OFFSET: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Value `j` of each word less its points, times its scale, rounded."""
    return ((value_of(words, j, FORMAT, OFFSET, dtype).to(tl.float32) - points) * scale).to(dtype)


@triton.jit
def words_kernel(  # type: ignore[no-untyped-def]
    values_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    global_ptr,
    first,
    outputs,
    num_words,
    num_groups,
    word_stride_n,
    word_stride_k,
    scale_stride_n,
    scale_stride_g,
    zero_stride_n,
    zero_stride_g,
    FORMAT: tl.constexpr,
    VALUES: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OFFSET: tl.constexpr,
    GLOBAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N outputs from `first` on and BLOCK_K words of VALUES inputs, four or eight, each of one group, to
    [outputs - first, inputs]. The other arguments are those of `product_kernel`.
    """
    n = (first + tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    i = (tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
    has = (n < outputs) & (i < num_words)
    dtype: tl.constexpr = values_ptr.dtype.element_ty
    wait_for_previous(PDL)
    place = n.to(tl.int64) * word_stride_n + i.to(tl.int64) * word_stride_k
    words = tl.load(words_ptr + place, mask=has, other=0)
    g = i * VALUES // GROUP if num_groups > 1 else i * 0
    scale_ptrs = scales_ptr + (n // ROWS).to(tl.int64) * scale_stride_n + g * scale_stride_g
    scale = scale_of(tl.load(scale_ptrs, mask=has, other=0.0), FORMAT)
    scale = _scaled_by_all(scale, global_ptr, n, outputs, GLOBAL)
    points = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    if zeros_ptr is not None:
        points = points_of(zeros_ptr, n, g, has, zero_stride_n, zero_stride_g, FORMAT, VALUES, ROWS)
    # Each `join` is another last axis: of the bits of `j` the highest comes first.
    v0 = _number(words, points, scale, 0, FORMAT, OFFSET, dtype)
    v1 = _number(words, points, scale, 1, FORMAT, OFFSET, dtype)
    v2 = _number(words, points, scale, 2, FORMAT, OFFSET, dtype)
    v3 = _number(words, points, scale, 3, FORMAT, OFFSET, dtype)
    if VALUES == 8:
        v4 = _number(words, points, scale, 4, FORMAT, OFFSET, dtype)
        v5 = _number(words, points, scale, 5, FORMAT, OFFSET, dtype)
        v6 = _number(words, points, scale, 6, FORMAT, OFFSET, dtype)
        v7 = _number(words, points, scale, 7, FORMAT, OFFSET, dtype)
        made = tl.join(tl.join(tl.join(v0, v4), tl.join(v2, v6)), tl.join(tl.join(v1, v5), tl.join(v3, v7)))
    else:
        made = tl.join(tl.join(v0, v2), tl.join(v1, v3))
    made = tl.reshape(made, (BLOCK_N, BLOCK_K * VALUES))
    k = (tl.program_id(1) * (BLOCK_K * VALUES) + tl.arange(0, BLOCK_K * VALUES))[None, :]
    inputs = num_words * VALUES
    tl.store(values_ptr + (n - first).to(tl.int64) * inputs + k, made, mask=(n < outputs) & (k < inputs))


@triton.jit
def values_kernel(  # type: ignore[no-untyped-def]
    values_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    groups_ptr,
    global_ptr,
    first,
    outputs,
    inputs,
    num_groups,
    word_stride_n,
    word_stride_k,
    scale_stride_n,
    scale_stride_g,
    zero_stride_n,
    zero_stride_g,
    FORMAT: tl.constexpr,
    VALUES: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OFFSET: tl.constexpr,
    GLOBAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N outputs from `first` on and BLOCK_K inputs of the weight's values, [outputs - first, inputs], rounded to
    their dtype. The other arguments are those of `product_kernel`; FORMAT is not of FP4, whose words have a group each.
    """
    n = (first + tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    k = (tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
    has = (n < outputs) & (k < inputs)
    wait_for_previous(PDL)
    if VALUES == 1:
        nothing: tl.constexpr = 0.0 if FORMAT == "fp8" else 0  # pyright: ignore[reportAssignmentType]
        value = tl.load(words_ptr + n.to(tl.int64) * word_stride_n + k, mask=has, other=nothing).to(tl.float32)
    else:
        BITS: tl.constexpr = 32 // VALUES
        place = n.to(tl.int64) * word_stride_n + (k // VALUES).to(tl.int64) * word_stride_k
        bits = (tl.load(words_ptr + place, mask=has, other=0) >> (k % VALUES * BITS)) & ((1 << BITS) - 1)
        value = bits.to(tl.float32)
    if groups_ptr is not None:
        g = tl.load(groups_ptr + k, mask=k < inputs, other=-1)
        has = has & (g >= 0) & (g < num_groups)
    else:
        g = k // GROUP if num_groups > 1 else k * 0
    if zeros_ptr is not None:
        value -= points_of(zeros_ptr, n, g, has, zero_stride_n, zero_stride_g, FORMAT, VALUES, ROWS)
    value -= OFFSET
    scale_ptrs = scales_ptr + (n // ROWS).to(tl.int64) * scale_stride_n + g * scale_stride_g
    scale = scale_of(tl.load(scale_ptrs, mask=has, other=0.0), FORMAT)
    scale = _scaled_by_all(scale, global_ptr, n, outputs, GLOBAL)
    place = (n - first).to(tl.int64) * inputs + k
    tl.store(values_ptr + place, (value * scale).to(values_ptr.dtype.element_ty), mask=(n < outputs) & (k < inputs))
