"""Experts in Triton for any number of tokens: pairs of a token and one of its experts, in the order of experts.

1. `order_kernel` lists the pairs by expert, those of an expert in the order of tokens; `count_kernel` and
   `place_kernel` do it for many pairs;
2. `grouped_kernel` multiplies tiles of an expert's rows by its weight, and activates what it made;
3. `grouped_kernel` again for the second product;
4. `sum_kernel` adds up the pairs of each token, in the order of `expert_ids`.

As many programs are launched as any choice of experts can need; those without rows return at once. Nothing is read
back, and nothing is added atomically: with the same tiles, a token gets the same numbers in every run, whatever other
tokens there are. A weight that no token goes to isn't read.
"""

# To pyright a kernel that is called by another returns nothing.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.experts.triton_activation import activated, gated
from precast.kernels.triton_chain import wait_for_previous


@triton.jit
def _expert_of(ids_ptr, pair, num_pairs, stride_t, stride_j, TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The experts of pairs, NUM_EXPERTS for an id that is no expert's; NUM_EXPERTS + 1 beyond the last pair."""
    place = (pair // TOP_K).to(tl.int64) * stride_t + pair % TOP_K * stride_j
    found = tl.load(ids_ptr + place, mask=pair < num_pairs, other=0)
    is_expert = (found >= 0) & (found < NUM_EXPERTS)
    expert = tl.where(is_expert, found, NUM_EXPERTS).to(tl.int32)
    return tl.where(pair < num_pairs, expert, NUM_EXPERTS + 1)


@triton.jit
def order_kernel(  # type: ignore[no-untyped-def]
    starts_ptr,
    pairs_ptr,
    ids_ptr,
    num_pairs,
    stride_t,
    stride_j,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The pairs of one expert, and where they start; the last program has those of no expert, and the end of all."""
    wait_for_previous(PDL)
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_pairs, BLOCK):
        found = _expert_of(ids_ptr, first + lane, num_pairs, stride_t, stride_j, TOP_K, NUM_EXPERTS)
        before += (found < expert).to(tl.int32)
    start = tl.sum(before, 0)
    tl.store(starts_ptr + expert, start)
    if expert == NUM_EXPERTS:
        tl.store(starts_ptr + expert + 1, num_pairs)
    for first in range(0, num_pairs, BLOCK):
        found = _expert_of(ids_ptr, first + lane, num_pairs, stride_t, stride_j, TOP_K, NUM_EXPERTS)
        is_own = (found == expert).to(tl.int32)
        place = start + tl.cumsum(is_own, 0) - 1
        tl.store(pairs_ptr + place, first + lane, mask=found == expert)
        start += tl.sum(is_own, 0)


@triton.jit
def count_kernel(  # type: ignore[no-untyped-def]
    counts_ptr,
    ids_ptr,
    num_pairs,
    stride_t,
    stride_j,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """How many of BLOCK pairs each expert has: a row of EXPERTS_BLOCK numbers, as `_expert_of` counts experts."""
    wait_for_previous(PDL)
    block = tl.program_id(0)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    expert = _expert_of(ids_ptr, pair, num_pairs, stride_t, stride_j, TOP_K, NUM_EXPERTS)
    counts = tl.histogram(expert, EXPERTS_BLOCK)
    tl.store(counts_ptr + block * EXPERTS_BLOCK + tl.arange(0, EXPERTS_BLOCK), counts)


@triton.jit
def place_kernel(  # type: ignore[no-untyped-def]
    starts_ptr,
    pairs_ptr,
    counts_ptr,
    ids_ptr,
    num_pairs,
    stride_t,
    stride_j,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    OTHERS: tl.constexpr,
    PDL: tl.constexpr,
):
    """What `order_kernel` lists, of BLOCK pairs, whose expert's pairs before them `count_kernel` has counted.

    It reads ROWS of counts at a time, and compares each pair with OTHERS at a time. What it counts is added up across
    threads at the end alone.
    """
    wait_for_previous(PDL)
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    pair = block * BLOCK + lane
    expert = _expert_of(ids_ptr, pair, num_pairs, stride_t, stride_j, TOP_K, NUM_EXPERTS)
    is_before = tl.zeros([BLOCK, OTHERS], tl.int32)
    for first in tl.static_range(0, BLOCK, OTHERS):
        other = first + tl.arange(0, OTHERS)
        found = _expert_of(ids_ptr, block * BLOCK + other, num_pairs, stride_t, stride_j, TOP_K, NUM_EXPERTS)
        is_before += ((other[None, :] < lane[:, None]) & (found[None, :] == expert[:, None])).to(tl.int32)
    place = tl.sum(is_before, 1)

    each = tl.arange(0, EXPERTS_BLOCK)
    total = tl.zeros([ROWS, EXPERTS_BLOCK], tl.int32)
    before = tl.zeros([ROWS, EXPERTS_BLOCK], tl.int32)
    for first in range(0, tl.num_programs(0), ROWS):
        row = first + tl.arange(0, ROWS)
        counts_ptrs = counts_ptr + row[:, None] * EXPERTS_BLOCK + each[None, :]
        counts = tl.load(counts_ptrs, mask=(row < tl.num_programs(0))[:, None], other=0)
        total += counts
        before += tl.where((row < block)[:, None], counts, 0)
    of_experts = tl.sum(total, 0)
    start = tl.cumsum(of_experts, 0) - of_experts
    if block == 0:
        tl.store(starts_ptr + each, start, mask=each < NUM_EXPERTS + 2)
    place += tl.gather(start + tl.sum(before, 0), expert, 0)
    tl.store(pairs_ptr + place, pair, mask=pair < num_pairs)


@triton.jit
def tile_of(starts_ptr, LISTED: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """The expert of this program, and its first row and the end of its expert's; LISTED or more if it has none."""
    each = tl.arange(0, EXPERTS_BLOCK)
    begin = tl.load(starts_ptr + each, mask=each < LISTED, other=0)
    end = tl.load(starts_ptr + each + 1, mask=each < LISTED, other=0)
    tiles = (end - begin + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, 0)
    tile = tl.program_id(1)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    first = begin + (tile - ends + tiles) * BLOCK_M
    is_own = each == expert
    return expert, tl.sum(tl.where(is_own, first, 0), 0), tl.sum(tl.where(is_own, end, 0), 0)


@triton.jit
def rows_of_weight(first_n, COUNT: tl.constexpr, IS_GATED: tl.constexpr, SWAPPED: tl.constexpr, SIZE_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """The rows of a weight that COUNT results from `first_n` on are made of, and which of them there are.

    Rows of a gate and of its values come in turn, by eights where they are the rows of a product, so that a thread has
    both of a number.
    """
    TURN: tl.constexpr = 8 if SWAPPED else 1  # pyright: ignore[reportAssignmentType]
    each = tl.arange(0, 2 * COUNT if IS_GATED else COUNT)
    n = first_n + (each // (2 * TURN) * TURN + each % TURN if IS_GATED else each)
    is_row = n < SIZE_N
    if IS_GATED:
        n += each // TURN % 2 * SIZE_N
    return n, is_row


@triton.jit
def add_product(total, weight, x, SWAPPED: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """`total` and the product of rows of the weight and rows of tokens; `SWAPPED`: tokens are its columns."""
    if SWAPPED:
        total = tl.dot(weight, tl.trans(x), total, input_precision=PRECISION)
    else:
        total = tl.dot(x, tl.trans(weight), total, input_precision=PRECISION)
    return total


@triton.jit
def store_results(  # type: ignore[no-untyped-def]
    y_ptr,
    y,
    bias_ptr,
    bias_stride_n,
    target,
    is_row,
    first_n,
    has_products,
    SIZE_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    SWAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Adds the bias to sums, activates them, and stores the COUNT results from `first_n` on of each row."""
    if HAS_BIAS:
        n, is_weight = rows_of_weight(first_n, COUNT, IS_GATED, SWAPPED, SIZE_N)
        bias = tl.load(bias_ptr + n * bias_stride_n, mask=is_weight & has_products, other=0.0).to(tl.float32)
        y += bias[:, None] if SWAPPED else bias[None, :]
    if IS_GATED:
        if SWAPPED:
            turns = tl.permute(tl.reshape(y, [COUNT // 8, 2, 8, BLOCK_M]), [0, 2, 3, 1])
            gate, value = tl.split(turns)
            y = tl.reshape(gated(gate, value, ACTIVATION, ALPHA, LIMIT, OFFSET), [COUNT, BLOCK_M])
        else:
            gate, value = tl.split(tl.reshape(y, [BLOCK_M, COUNT, 2]))
            y = gated(gate, value, ACTIVATION, ALPHA, LIMIT, OFFSET)
    elif ACTIVATION != "":
        y = activated(y, ACTIVATION, ALPHA)
    n = first_n + tl.arange(0, COUNT)
    target = target.to(tl.int64) * SIZE_N
    if SWAPPED:
        y_ptrs, mask = y_ptr + target[None, :] + n[:, None], is_row[None, :] & (n < SIZE_N)[:, None]
    else:
        y_ptrs, mask = y_ptr + target[:, None] + n[None, :], is_row[:, None] & (n < SIZE_N)[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _multiply(  # type: ignore[no-untyped-def]
    y_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    pairs_ptr,
    x_stride_m,
    x_stride_k,
    weight_stride_n,
    weight_stride_k,
    bias_stride_n,
    first,
    end,
    last,
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
    SWAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """BLOCK_N numbers of the rows from `first` to `end`, BLOCK_M at most: sums over `last` products, SIZE_K or none.

    `weight_ptr` and `bias_ptr` are the expert's.
    """
    row = first + tl.arange(0, BLOCK_M)
    is_row = row < end
    pair = row
    if GATHERS or SCATTERS:
        pair = tl.load(pairs_ptr + row, mask=is_row, other=0)
    source = pair // TOP_K if GATHERS else row
    target = pair if SCATTERS else row
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + source.to(tl.int64)[:, None] * x_stride_m + k[None, :] * x_stride_k
    first_n = tl.program_id(0) * BLOCK_N
    n, is_weight = rows_of_weight(first_n, BLOCK_N, IS_GATED, SWAPPED, SIZE_N)
    weight_ptrs = weight_ptr + n[:, None] * weight_stride_n + k[None, :] * weight_stride_k
    WEIGHTS: tl.constexpr = 2 * BLOCK_N if IS_GATED else BLOCK_N
    y = tl.zeros([WEIGHTS, BLOCK_M] if SWAPPED else [BLOCK_M, WEIGHTS], tl.float32)

    for start in range(0, last, BLOCK_K):
        is_k = start + k[None, :] < SIZE_K if SIZE_K % BLOCK_K != 0 else True
        x = tl.load(x_ptrs, mask=is_row[:, None] & is_k, other=0.0)
        y = add_product(y, tl.load(weight_ptrs, mask=is_weight[:, None] & is_k, other=0.0), x, SWAPPED, PRECISION)
        weight_ptrs += BLOCK_K * weight_stride_k
        x_ptrs += BLOCK_K * x_stride_k

    store_results(
        y_ptr, y, bias_ptr, bias_stride_n, target, is_row, first_n, last > 0, SIZE_N, HAS_BIAS, IS_GATED, ACTIVATION,
        ALPHA, LIMIT, OFFSET, SWAPPED, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit
def grouped_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    starts_ptr,
    pairs_ptr,
    x_stride_m,
    x_stride_k,
    weight_stride_e,
    weight_stride_n,
    weight_stride_k,
    bias_stride_e,
    bias_stride_n,
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
    ZEROES: tl.constexpr,
    SWAPPED: tl.constexpr,
    LEAST_M: tl.constexpr,
    HALVINGS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N numbers of a tile: up to LEAST_M * 2^HALVINGS rows of one expert, multiplied as half, a quarter or less
    of them where it has no more.

    It `GATHERS` row `pair // TOP_K` of x, or takes them in order; it `SCATTERS` them to the row of their pair, or
    leaves them in order. `ZEROES`: rows of no expert become zeros, or else they aren't written.
    """
    wait_for_previous(PDL)
    BLOCK_M: tl.constexpr = LEAST_M << HALVINGS
    expert, first, end = tile_of(starts_ptr, NUM_EXPERTS + ZEROES, EXPERTS_BLOCK, BLOCK_M)
    if expert >= NUM_EXPERTS + ZEROES:
        return
    num_rows = tl.minimum(end - first, BLOCK_M)
    weight_ptr += expert.to(tl.int64) * weight_stride_e
    if HAS_BIAS:
        bias_ptr += expert.to(tl.int64) * bias_stride_e
    last = SIZE_K
    if ZEROES:
        last = tl.where(expert < NUM_EXPERTS, SIZE_K, 0)
    for halving in tl.static_range(HALVINGS + 1):
        fewer = BLOCK_M >> (halving + 1) if halving < HALVINGS else 0
        if (num_rows <= BLOCK_M >> halving) & (num_rows > fewer):
            _multiply(
                y_ptr, x_ptr, weight_ptr, bias_ptr, pairs_ptr, x_stride_m, x_stride_k, weight_stride_n, weight_stride_k,
                bias_stride_n, first, end, last, TOP_K, SIZE_K, SIZE_N, HAS_BIAS, IS_GATED, ACTIVATION, ALPHA, LIMIT,
                OFFSET, GATHERS, SCATTERS, SWAPPED, BLOCK_M >> halving, BLOCK_N, BLOCK_K, PRECISION,
            )  # fmt: skip


@triton.jit
def sum_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    rows_ptr,
    ids_ptr,
    weights_ptr,
    ids_stride_t,
    ids_stride_j,
    weights_stride_t,
    weights_stride_j,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The weighted sum of the rows [T * TOP_K, SIZE] of a token, for BLOCK numbers; those of no expert aren't read."""
    wait_for_previous(PDL)
    token = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + token * ids_stride_t + j * ids_stride_j)
        is_expert = (expert >= 0) & (expert < NUM_EXPERTS)
        weight = tl.load(weights_ptr + token * weights_stride_t + j * weights_stride_j, mask=is_expert, other=0.0)
        row = tl.load(rows_ptr + (token * TOP_K + j) * SIZE + d, mask=is_expert & (d < SIZE), other=0.0)
        total += weight.to(tl.float32) * row.to(tl.float32)
    tl.store(y_ptr + token * SIZE + d, total.to(y_ptr.dtype.element_ty), mask=d < SIZE)
