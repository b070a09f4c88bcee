"""Experts in few bits in Triton: products by tiles of an expert's rows, whose weights are read as they are stored.

For few tokens each pair of a token and an expert is a tile of its own; else pairs are put into the order of experts, as
`precast.kernels.experts.triton` does it. From there come the order of pairs, what is done with sums, and the sum over
the pairs of a token. Weights are the rows of a product, tokens its columns, of which matrix instructions take as few
as 8. Sums are float32.

A scale that a whole block of a row shares is multiplied with the block's sum; where a block has several, with the
values.

Rows that are rounded to few bits have been so before, by `round_kernel` of `precast.kernels.quantised_linear.triton`:
those of tokens, and those between the products. Float8 times float8 and int8 times int8 are products of eight bits.
"""

# To pyright a kernel that is called by another returns nothing.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.experts.triton import rows_of_weight, store_results, tile_of
from precast.kernels.experts.triton_few import wait_and_release
from precast.kernels.quantised_experts.triton_values import (
    byte_values,
    fp4_halves,
    fp4_scale,
    fp4_unshifted,
    halves_of_pairs,
    int4_halves,
)
from precast.kernels.triton_chain import prefetch, wait_for_previous

_ROW_GROUP = tl.constexpr(128)
"""Neighbours of a row that have a scale together: `INPUT_GROUP` of `precast.kernels.quantised_linear.launches`."""


@triton.jit
def _scales_of(  # type: ignore[no-untyped-def]
    scales_ptr,
    zeros_ptr,
    n,
    is_weight,
    start,
    SIZE_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,
    ZEROS: tl.constexpr,
):
    """The scales, and the zeros, of the rows `n` in the block of columns from `start` on: [N, groups of the block].

    `ZEROS`: bits of those that are packed along the rows, 8 of others as those of int8; 0 for none.
    """
    GROUPS: tl.constexpr = (SIZE_K + GROUP_K - 1) // GROUP_K
    EACH: tl.constexpr = BLOCK_K // GROUP_K if BLOCK_K > GROUP_K else 1  # pyright: ignore[reportAssignmentType]
    group = start // GROUP_K + tl.arange(0, EACH)
    mask = is_weight[:, None] & (group < GROUPS)[None, :]
    scale = tl.load(scales_ptr + (n // GROUP_N)[:, None] * GROUPS + group[None, :], mask=mask, other=0.0)
    zero = 0
    if ZEROS == -8:
        zero = tl.load(zeros_ptr + (n // GROUP_N)[:, None] * GROUPS + group[None, :], mask=mask, other=0)
    elif ZEROS > 0:
        PER_WORD: tl.constexpr = 32 // ZEROS
        words = tl.load(zeros_ptr + (n // PER_WORD)[:, None] * GROUPS + group[None, :], mask=mask, other=0)
        zero = (words >> (n % PER_WORD * ZEROS)[:, None]) & ((1 << ZEROS) - 1)  # pyright: ignore[reportOperatorIssue]
    return scale, zero


@triton.jit
def _each(part, COUNT: tl.constexpr, EACH: tl.constexpr, GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """[N, GROUPS] as [N, GROUPS * EACH], each repeated."""
    return tl.reshape(tl.broadcast_to(part[:, :, None], [COUNT, GROUPS, EACH]), [COUNT, GROUPS * EACH])


@triton.jit
def _multiply(  # type: ignore[no-untyped-def]
    y_ptr,
    x_ptr,
    weight_ptr,
    scales_ptr,
    zeros_ptr,
    whole_ptr,
    bias_ptr,
    row_scales_ptr,
    pairs_ptr,
    x_stride_m,
    x_stride_k,
    first,
    end,
    TOP_K: tl.constexpr,
    SIZE_K: tl.constexpr,
    SIZE_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    GATHERS: tl.constexpr,
    SCATTERS: tl.constexpr,
    BY_PAIR: tl.constexpr,
    VALUES: tl.constexpr,
    SCALES: tl.constexpr,
    GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,
    ZEROS: tl.constexpr,
    ZERO_OFFSET: tl.constexpr,
    WHOLE: tl.constexpr,
    IS_DIVIDED: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    X_IN_PAIRS: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """BLOCK_N numbers of the rows from `first` to `end`, BLOCK_M at most. Pointers of weights are the expert's."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    IS_INT8: tl.constexpr = x_ptr.dtype.element_ty == tl.int8
    IS_EXACT: tl.constexpr = IS_INT8 or x_ptr.dtype.element_ty == tl.float8e4nv
    NOTHING: tl.constexpr = 0 if IS_INT8 else 0.0  # pyright: ignore[reportAssignmentType]
    COUNT: tl.constexpr = 2 * BLOCK_N if IS_GATED else BLOCK_N
    HALVES: tl.constexpr = VALUES == "fp4" or VALUES == "int4"
    BYTES: tl.constexpr = 2 if HALVES else 1  # pyright: ignore[reportAssignmentType]
    BLOCK_B: tl.constexpr = BLOCK_K // BYTES
    WITHIN: tl.constexpr = BLOCK_K > GROUP_K
    GROUPS: tl.constexpr = BLOCK_K // GROUP_K if WITHIN else 1  # pyright: ignore[reportAssignmentType]
    IS_SCALED: tl.constexpr = WITHIN or VALUES == "fp4"
    IN_STEPS: tl.constexpr = not IS_SCALED or ROW_SCALES == "steps"  # pyright: ignore[reportAssignmentType]
    row = first + tl.arange(0, BLOCK_M)
    is_row = row < end
    pair = row
    if (GATHERS or SCATTERS) and not BY_PAIR:
        pair = tl.load(pairs_ptr + row, mask=is_row, other=0)
    source = (pair // TOP_K if GATHERS else row).to(tl.int64)
    target = pair if SCATTERS else row
    first_n = tl.program_id(0) * BLOCK_N
    n, is_weight = rows_of_weight(first_n, BLOCK_N, IS_GATED, True, SIZE_N)
    begin, last = 0, SIZE_K
    if SPLITS > 1:
        PART: tl.constexpr = (SIZE_K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
        begin = tl.program_id(2) * PART
        last = tl.minimum(begin + PART, SIZE_K)
        y_ptr += tl.program_id(2).to(tl.int64) * tl.num_programs(1) * SIZE_N
    b = begin // BYTES + tl.arange(0, BLOCK_B)
    weight_ptrs = weight_ptr + n[:, None] * (SIZE_K // BYTES) + b[None, :]
    if X_IN_PAIRS:
        x_ptrs = x_ptr.to(tl.pointer_type(tl.int32)) + source[:, None] * (x_stride_m // 2) + b[None, :]
    else:
        x_ptrs = x_ptr + source[:, None] * x_stride_m + (b * BYTES)[None, :] * x_stride_k
    y = tl.zeros([COUNT, BLOCK_M], tl.float32)
    scale, zero = _scales_of(scales_ptr, zeros_ptr, n, is_weight, begin, SIZE_K, BLOCK_K, GROUP_N, GROUP_K, ZEROS)

    for start in range(begin, last, BLOCK_K):
        is_b = ((start - begin) // BYTES + b < SIZE_K // BYTES)[None, :] if SIZE_K % BLOCK_K != 0 else True
        values = tl.load(weight_ptrs, mask=is_weight[:, None] & is_b, other=0.0)
        x = tl.load(x_ptrs, mask=is_row[:, None] & is_b, other=0 if X_IN_PAIRS else NOTHING)
        # Those of the next block: they are of too few bytes to be loaded ahead as the values are.
        next_scale, next_zero = _scales_of(
            scales_ptr, zeros_ptr, n, is_weight, start + BLOCK_K, SIZE_K, BLOCK_K, GROUP_N, GROUP_K, ZEROS
        )
        taken = tl.zeros([COUNT, GROUPS], tl.int32) + (zero + ZERO_OFFSET)
        factor = fp4_scale(scale, SCALES, IN_PAIRS) if VALUES == "fp4" else scale
        if WITHIN or VALUES == "fp4":
            factor = _each(factor, COUNT, BLOCK_B // GROUPS, GROUPS)
        taken = _each(taken, COUNT, BLOCK_B // GROUPS, GROUPS)
        if ROW_SCALES == "steps":
            COUNT_X: tl.constexpr = (SIZE_K + _ROW_GROUP - 1) // _ROW_GROUP
            of_x = tl.load(row_scales_ptr + source * COUNT_X + start // _ROW_GROUP, mask=is_row, other=0.0)
        if VALUES == "fp4":
            low, high = fp4_halves(values, factor, DTYPE, IN_PAIRS)
        elif VALUES == "int4":
            low, high = int4_halves(values, taken, factor, DTYPE, IN_PAIRS, WITHIN)
        elif not IS_EXACT:
            weight = byte_values(values, taken, factor, VALUES, DTYPE, IN_PAIRS, WITHIN)
        part = tl.zeros([COUNT, BLOCK_M], tl.float32) if IN_STEPS else y
        if HALVES:
            if X_IN_PAIRS:
                even, odd = halves_of_pairs(x, DTYPE)
            else:
                even = x
                odd = tl.load(x_ptrs + x_stride_k, mask=is_row[:, None] & is_b, other=0.0)
            part = tl.dot(low, tl.trans(even), part, input_precision=PRECISION)
            part = tl.dot(high, tl.trans(odd), part, input_precision=PRECISION)
        elif IS_INT8:
            part = tl.dot(values, tl.trans(x), out_dtype=tl.int32).to(tl.float32)
        elif IS_EXACT:
            part = tl.dot(values, tl.trans(x), out_dtype=tl.float32)
        else:
            part = tl.dot(weight, tl.trans(x), part, input_precision=PRECISION)
        if not IS_SCALED:
            part *= scale.to(tl.float32)
        if ROW_SCALES == "steps":
            part *= of_x[None, :]
        y = y + part if IN_STEPS else part
        scale, zero = next_scale, next_zero
        weight_ptrs += BLOCK_B
        x_ptrs += BLOCK_B if X_IN_PAIRS else BLOCK_K * x_stride_k

    if VALUES == "fp4":
        y = fp4_unshifted(y, IN_PAIRS)
    if ROW_SCALES == "rows":
        y *= tl.load(row_scales_ptr + source, mask=is_row, other=0.0)[None, :]
    if WHOLE > 0:
        whole = tl.load(whole_ptr + (n if WHOLE > 1 else n * 0), mask=is_weight, other=1.0).to(tl.float32)
        y = y / whole[:, None] if IS_DIVIDED else y * whole[:, None]
    store_results(
        y_ptr, y, bias_ptr, 1, target, is_row, first_n, begin == 0, SIZE_N, HAS_BIAS, IS_GATED, ACTIVATION, ALPHA,
        LIMIT, OFFSET, True, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit
def product_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    x_ptr,
    weight_ptr,
    scales_ptr,
    zeros_ptr,
    whole_ptr,
    bias_ptr,
    row_scales_ptr,
    ids_ptr,
    starts_ptr,
    pairs_ptr,
    x_stride_m,
    x_stride_k,
    ids_stride_t,
    ids_stride_j,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    SIZE_K: tl.constexpr,
    SIZE_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    GATHERS: tl.constexpr,
    SCATTERS: tl.constexpr,
    BY_PAIR: tl.constexpr,
    VALUES: tl.constexpr,
    SCALES: tl.constexpr,
    GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,
    ZEROS: tl.constexpr,
    ZERO_OFFSET: tl.constexpr,
    WHOLE: tl.constexpr,
    IS_DIVIDED: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    X_IN_PAIRS: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST_M: tl.constexpr,
    HALVINGS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    RELEASES_LATE: tl.constexpr,
    ASKS_AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N numbers of a tile of rows of one expert: of the pair `program_id(1)`, or of a tile as `grouped_kernel` of
    `precast.kernels.experts.triton` has it, up to LEAST_M * 2^HALVINGS rows.

    `VALUES`: "fp4", "int4", two a byte; "float8", "int8", "uint8". A scale is that of GROUP_N rows and GROUP_K columns.
    `SCALES`: "e8m0", "e4m3", or "float". `ZEROS`: as `_scales_of` has it. `WHOLE`: 1 for a scale of all, 2 for one of
    each row, by which sums are multiplied, or divided. `IN_PAIRS`: values are made two at once. `X_IN_PAIRS`: rows of x
    are read as pairs of neighbours. `ROW_SCALES`: the rows of x have "none", one each ("rows"), or one for each
    `_ROW_GROUP` neighbours ("steps"), of which a block has a part. `SPLITS`: parts of the sums, of which
    `program_id(2)` makes one, below those before it; by pairs only. `RELEASES_LATE`: the next kernel begins when all
    that earlier ones wrote is there;
    one that `ASKS_AHEAD` reads the pairs' experts by that, and has its weights brought to the L2 cache while the kernel
    in front of it runs.
    """
    BLOCK_M: tl.constexpr = LEAST_M << HALVINGS
    ROWS: tl.constexpr = 2 * SIZE_N if IS_GATED else SIZE_N
    BYTES: tl.constexpr = SIZE_K // 2 if VALUES == "fp4" or VALUES == "int4" else SIZE_K
    if RELEASES_LATE:
        wait_and_release(PDL)
    elif not ASKS_AHEAD:
        wait_for_previous(PDL)
    if BY_PAIR:
        first = tl.program_id(1)
        end = first + 1
        token = (first // TOP_K).to(tl.int64)
        expert = tl.load(ids_ptr + token * ids_stride_t + first % TOP_K * ids_stride_j)
        expert = tl.where((expert >= 0) & (expert < NUM_EXPERTS), expert, NUM_EXPERTS)
    else:
        expert, first, end = tile_of(starts_ptr, NUM_EXPERTS, EXPERTS_BLOCK, BLOCK_M)
    if ASKS_AHEAD:
        if expert < NUM_EXPERTS:
            n, _ = rows_of_weight(tl.program_id(0) * BLOCK_N, BLOCK_N, IS_GATED, True, SIZE_N)
            asked = weight_ptr.to(tl.pointer_type(tl.uint8)) + expert.to(tl.int64) * ROWS * BYTES
            prefetch(asked + tl.minimum(n, ROWS - 1) * BYTES, BYTES)
        wait_for_previous(PDL)
    if expert >= NUM_EXPERTS:
        return
    num_rows = tl.minimum(end - first, BLOCK_M)
    GROUPS: tl.constexpr = (SIZE_K + GROUP_K - 1) // GROUP_K
    PER_WORD: tl.constexpr = 32 // ZEROS if ZEROS > 0 else GROUP_N
    expert = expert.to(tl.int64)
    if VALUES == "int4" or VALUES == "uint8":
        weight_ptr = weight_ptr.to(tl.pointer_type(tl.uint8))
    weight_ptr += expert * ROWS * BYTES
    scales_ptr += expert * (((ROWS + GROUP_N - 1) // GROUP_N) * GROUPS)
    if ZEROS != 0:
        zeros_ptr += expert * (((ROWS + PER_WORD - 1) // PER_WORD) * GROUPS)
    if WHOLE > 0:
        whole_ptr += expert * (ROWS if WHOLE > 1 else 1)
    if HAS_BIAS:
        bias_ptr += expert * ROWS
    for halving in tl.static_range(HALVINGS + 1):
        fewer = BLOCK_M >> (halving + 1) if halving < HALVINGS else 0
        if (num_rows <= BLOCK_M >> halving) & (num_rows > fewer):
            _multiply(
                y_ptr, x_ptr, weight_ptr, scales_ptr, zeros_ptr, whole_ptr, bias_ptr, row_scales_ptr, pairs_ptr,
                x_stride_m, x_stride_k, first, end, TOP_K, SIZE_K, SIZE_N, HAS_BIAS, IS_GATED, ACTIVATION, ALPHA, LIMIT,
                OFFSET, GATHERS, SCATTERS, BY_PAIR, VALUES, SCALES, GROUP_N, GROUP_K, ZEROS, ZERO_OFFSET, WHOLE,
                IS_DIVIDED, IN_PAIRS, X_IN_PAIRS, ROW_SCALES, SPLITS, BLOCK_M >> halving, BLOCK_N, BLOCK_K, PRECISION,
            )  # fmt: skip


@triton.jit
def sum_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    rows_ptr,
    ids_ptr,
    weights_ptr,
    num_pairs,
    ids_stride_t,
    ids_stride_j,
    weights_stride_t,
    weights_stride_j,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SPLITS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The weighted sum of a token's rows, BLOCK numbers of it: `rows_ptr` [SPLITS, num_pairs, SIZE], float32.

    The ids and weights were there before the first product let the second begin, so they are read before its rows are
    made; those of no expert aren't read.
    """
    token = tl.program_id(1).to(tl.int64)
    each = tl.arange(0, BLOCK_J)
    j = each % TOP_K
    expert = tl.load(ids_ptr + token * ids_stride_t + j * ids_stride_j, mask=each < SPLITS * TOP_K, other=-1)
    is_expert = (expert >= 0) & (expert < NUM_EXPERTS)
    weight = tl.load(weights_ptr + token * weights_stride_t + j * weights_stride_j, mask=is_expert, other=0.0)
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = (each // TOP_K).to(tl.int64) * num_pairs + token * TOP_K + j
    wait_for_previous(PDL)
    rows_ptrs = rows_ptr + row[:, None] * SIZE + d[None, :]
    rows = tl.load(rows_ptrs, mask=is_expert[:, None] & (d < SIZE)[None, :], other=0.0)
    total = tl.sum(weight.to(tl.float32)[:, None] * rows, 0)
    tl.store(y_ptr + token * SIZE + d, total.to(y_ptr.dtype.element_ty), mask=d < SIZE)
