"""`precast.paged_select_blocks` in Triton. Nothing is read back to the host, and no scores are kept.

Each program goes over a part of a sequence's blocks for a tile of queries, and holds of each row (a query and a head)
the best blocks so far (`score_kernel`). `select_kernel` chooses among what the parts found, and writes the numbers in
ascending order.

Scores are integers of the same order, as in `precast.kernels.sparse_attention.triton_select`.
"""

# To pyright, Triton's constants don't decide which branch is there, and some functions never return.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.attention.triton_tiles import SEQUENCES
from precast.kernels.sparse_attention.triton_select import in_order
from precast.kernels.triton_chain import wait_for_previous

_LEAST = tl.constexpr(-(1 << 31))
"""Of what isn't there."""
_MINUS_INF = tl.constexpr(-0x7F800001)
_INF = tl.constexpr(0x7F800000)
_LAST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _sequence_of_tile(cu_seqlens_ptr, tile, num_seqs, BLOCK_Q: tl.constexpr):  # type: ignore[no-untyped-def]
    """The number of a tile's sequence, `num_seqs` for one too many, and that of the sequence's first tile."""
    seq = 0
    begin = 0
    before = 0
    for first in range(0, num_seqs, SEQUENCES):
        b = first + tl.arange(0, SEQUENCES)
        is_real = b < num_seqs
        start = tl.load(cu_seqlens_ptr + b, mask=is_real, other=0)
        tiles = tl.cdiv(tl.load(cu_seqlens_ptr + b + 1, mask=is_real, other=0) - start, BLOCK_Q)
        ends = before + tl.cumsum(tiles, 0)
        seq += tl.sum((is_real & (ends <= tile)).to(tl.int32), 0)
        begin = tl.maximum(begin, tl.max(tl.where(ends <= tile, ends, 0), 0))
        before += tl.sum(tiles, 0)
    return seq, begin


@triton.jit
def _with_block(values, numbers, value, block):  # type: ignore[no-untyped-def]
    """The best blocks of rows, `values` and `numbers` [M, C], with one more [M] in the place of the worst, if it is
    better. Blocks come in ascending order: of equal ones the later is worse."""
    least = tl.min(values, 1)
    is_least = values == least[:, None]
    worst = tl.max(tl.where(is_least, numbers, _LEAST), 1)
    is_replaced = is_least & (numbers == worst[:, None]) & (value > least)[:, None]
    return tl.where(is_replaced, value[:, None], values), tl.where(is_replaced, block, numbers)


@triton.jit(do_not_specialize=["num_seqs"])
def score_kernel(  # type: ignore[no-untyped-def]
    values_ptr,
    numbers_ptr,
    q_ptr,
    cache_ptr,
    cu_seqlens_ptr,
    kv_lens_ptr,
    page_indices_ptr,
    page_indptr_ptr,
    page_start_ptr,
    num_seqs,
    q_stride_t,
    q_stride_h,
    q_stride_d,
    cache_stride_p,
    cache_stride_s,
    COUNT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LOCAL: tl.constexpr,
    PARTS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """The COUNT best blocks of one of PARTS parts of a sequence's blocks, for BLOCK_Q of its queries.

    `values` and `numbers` [T, HEADS, PARTS, BLOCK_C], int32: scores, and which blocks have them, in no order.
    """
    wait_for_previous(PDL)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    seq, begin = _sequence_of_tile(cu_seqlens_ptr, tile, num_seqs, BLOCK_Q)
    if seq == num_seqs:
        return
    first_token = tl.load(cu_seqlens_ptr + seq)
    num_queries = tl.load(cu_seqlens_ptr + seq + 1) - first_token
    first_page = tl.load(page_indptr_ptr + seq)
    num_slots = (tl.load(page_indptr_ptr + seq + 1) - first_page) * PAGE_SIZE
    page_start = tl.load(page_start_ptr + seq)
    first_query = (tile - begin) * BLOCK_Q
    own_queries = tl.minimum(num_queries - first_query, BLOCK_Q)

    row = tl.arange(0, BLOCK_Q * BLOCK_H)
    head = row % BLOCK_H
    is_row = (row // BLOCK_H < own_queries) & (head < HEADS)
    token = (first_token + first_query + row // BLOCK_H).to(tl.int64)
    position = tl.load(kv_lens_ptr + seq) - num_queries + first_query + row // BLOCK_H
    # Before position 0 there is no block, though division rounds up to one.
    own = tl.where(position >= 0, position // BLOCK_SIZE, -1)
    d = tl.arange(0, BLOCK_D)
    q_offsets = (token * q_stride_t + head * q_stride_h)[:, None] + d[None, :] * q_stride_d
    q = tl.load(q_ptr + q_offsets, mask=is_row[:, None] & (d < SIZE)[None, :], other=0.0)

    # The keys that some query of the tile sees.
    end = tl.minimum(tl.load(kv_lens_ptr + seq) - num_queries + first_query + own_queries, page_start + num_slots)
    first_block = page_start // BLOCK_SIZE
    num_blocks = tl.where(end > page_start, tl.cdiv(end, BLOCK_SIZE) - first_block, 0)
    split = tl.cdiv(num_blocks, PARTS)
    low = first_block + part * split
    high = tl.minimum(low + split, first_block + num_blocks)

    c = tl.arange(0, BLOCK_C)
    lane = tl.arange(0, BLOCK_N)
    # Places without a block are the worst, each of them another number; those past COUNT are never replaced.
    values = tl.zeros([BLOCK_Q * BLOCK_H, BLOCK_C], tl.int32) + tl.where(c < COUNT, _LEAST, _LAST)[None, :]
    numbers = tl.zeros([BLOCK_Q * BLOCK_H, BLOCK_C], tl.int32) - 1 - c[None, :]
    page_indices_ptr += first_page
    for block in range(low, high):
        best = tl.full([BLOCK_Q * BLOCK_H], _LEAST, tl.int32)
        for inner in range(0, BLOCK_SIZE, BLOCK_N):
            key = block * BLOCK_SIZE + inner + lane
            exists = (inner + lane < BLOCK_SIZE) & (key >= page_start) & (key < end)
            slot = tl.where(exists, key - page_start, 0)
            page = tl.load(page_indices_ptr + slot // PAGE_SIZE, mask=exists, other=0).to(tl.int64)
            slot_ptr = cache_ptr + page * cache_stride_p + slot % PAGE_SIZE * cache_stride_s
            k = tl.load(slot_ptr[:, None] + d[None, :], mask=exists[:, None] & (d < SIZE)[None, :], other=0.0)
            scores = in_order(tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION))
            seen = exists[None, :] & (key[None, :] <= position[:, None])
            best = tl.maximum(best, tl.max(tl.where(seen, scores, _LEAST), 1))
        best = tl.where(best <= _MINUS_INF, _LEAST, best)
        best = tl.where((block <= own) & (block > own - LOCAL), _INF, best)
        values, numbers = _with_block(values, numbers, best, block)
    place = ((token * HEADS + head) * PARTS + part)[:, None] * BLOCK_C + c[None, :]
    tl.store(values_ptr + place, tl.where((c < COUNT)[None, :], values, _LEAST), mask=is_row[:, None])
    tl.store(numbers_ptr + place, numbers, mask=is_row[:, None])


@triton.jit(do_not_specialize=["num_seqs"])
def select_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    values_ptr,
    numbers_ptr,
    cu_seqlens_ptr,
    num_seqs,
    COUNT: tl.constexpr,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """The blocks that a head of a query selects, `out` [T, HEADS, COUNT], of those that the parts found; -1 for
    padding. Each of PARTS and BLOCK_C is a power of two."""
    wait_for_previous(PDL)
    token = tl.program_id(0)
    row = token.to(tl.int64) * HEADS + tl.program_id(1)
    is_real = token < tl.load(cu_seqlens_ptr + num_seqs)
    lane = tl.arange(0, PARTS * BLOCK_C)
    place = row * (PARTS * BLOCK_C) + lane
    values = tl.load(values_ptr + place, mask=is_real & (lane >= 0), other=_LEAST)
    numbers = tl.load(numbers_ptr + place, mask=is_real & (lane >= 0), other=_LAST)
    c = tl.arange(0, BLOCK_C)
    chosen = tl.full([BLOCK_C], _LAST, tl.int32)
    for turn in range(0, COUNT):
        best = tl.max(values, 0)
        number = tl.min(tl.where(values == best, numbers, _LAST), 0)
        chosen = tl.where((c == turn) & (best > _LEAST), number, chosen)
        values = tl.where((values == best) & (numbers == number), _LEAST, values)
    # A number's place is how many are below it; those that are none come last, in any order.
    is_before = chosen[None, :] < chosen[:, None]
    is_before = is_before | ((chosen[None, :] == chosen[:, None]) & (c[None, :] < c[:, None]))
    rank = tl.sum(is_before.to(tl.int32), 1)
    tl.store(out_ptr + row * COUNT + rank, tl.where(chosen == _LAST, -1, chosen), mask=rank < COUNT)
