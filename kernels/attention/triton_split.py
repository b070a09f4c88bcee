"""Attention of few queries: several programs share the keys of a tile (`precast.kernels.attention.triton_tiles`)."""

# To pyright, Triton's constants don't decide which branch is there, and some functions never return.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.attention.triton_tiles import SEQUENCES, keys_of, range_of, store_rows, sums_of, tokens_of
from precast.kernels.triton_chain import is_first_program, let_next_begin, prefetch, wait_for_previous


@triton.jit
def small_tile(  # type: ignore[no-untyped-def]
    cu_seqlens_ptr,
    kv_lens_ptr,
    page_indptr_ptr,
    page_start_ptr,
    num_tokens,
    num_seqs,
    num_splits,
    least_keys,
    whole_keys,
    MOST_QUERIES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    LEAST_QUERIES: tl.constexpr,
):
    """What `split_kernel` and `merge_kernel` share: the tile of a program, and how its keys are split.

    With MOST_QUERIES tile `i` is the queries of sequence `i`, if it has no more than so many. Without, the tiles are
    those of all sequences: sequence b owns those from `cu_seqlens[b] // BLOCK_Q + b` on, at least as many as it needs;
    nothing is done for sequences of fewer than LEAST_QUERIES.

    Gives the sequence, its first token, the tile's first query, how many queries the sequence has, or 0 where the
    program has nothing to do; its pages' place, its keys and the position of the first; the keys that the tile sees,
    from `start` to `end`, and how many of them are a part.
    """
    tile = tl.program_id(0)
    if MOST_QUERIES > 0:
        seq = tile
        first_query = 0
        first_token, num_queries = tokens_of(cu_seqlens_ptr, seq, num_seqs, num_tokens)
        num_queries = tl.where(num_queries <= MOST_QUERIES, num_queries, 0)
    else:
        seq = -1
        for first in range(0, num_seqs + 1, SEQUENCES):
            b = first + tl.arange(0, SEQUENCES)
            bound = tl.load(cu_seqlens_ptr + b, mask=b <= num_seqs, other=0)
            seq += tl.sum(((b <= num_seqs) & (bound // BLOCK_Q + b <= tile)).to(tl.int32), 0)
        first_token, num_queries = tokens_of(cu_seqlens_ptr, seq, num_seqs, num_tokens)
        first_query = (tile - (first_token // BLOCK_Q + seq)) * BLOCK_Q
        num_queries = tl.where((first_query < num_queries) & (num_queries >= LEAST_QUERIES), num_queries, 0)
    first_page, kv_len, num_slots, page_start = keys_of(
        kv_lens_ptr, page_indptr_ptr, page_start_ptr, seq, num_seqs, num_queries, PAGE_SIZE
    )
    start, _, _, end = range_of(
        first_query, num_queries, kv_len, num_slots, page_start, BLOCK_Q, BLOCK_N, WINDOW, CHUNK
    )
    blocks = tl.cdiv(tl.maximum(end - start, 0), BLOCK_N)
    part_blocks = tl.maximum(tl.cdiv(blocks, num_splits), tl.cdiv(least_keys, BLOCK_N))
    # Few keys are one part: its program writes the result, and nothing else has anything to do.
    split = tl.where(end - start <= whole_keys, tl.maximum(blocks, part_blocks), part_blocks) * BLOCK_N
    return seq, first_token, first_query, num_queries, first_page, kv_len, page_start, start, end, split


@triton.jit
def _ask_ahead(  # type: ignore[no-untyped-def]
    k_ptr,
    v_ptr,
    page_indices_ptr,
    low,
    high,
    k_stride_p,
    k_stride_s,
    v_stride_p,
    v_stride_s,
    AHEAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
):
    """Has the L2 cache fetch the first AHEAD keys of those from `low` to `high`, and their values."""
    key = tl.minimum(low + tl.arange(0, AHEAD), high - 1)
    page = tl.load(page_indices_ptr + key // PAGE_SIZE).to(tl.int64)
    element: tl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth // 8
    prefetch(k_ptr + (page * k_stride_p + key % PAGE_SIZE * k_stride_s), SIZE * element)
    prefetch(v_ptr + (page * v_stride_p + key % PAGE_SIZE * v_stride_s), VALUE_SIZE * element)


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "num_splits", "least_keys", "whole_keys"])
def split_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    partial_ptr,
    weight_ptr,
    k_scale_ptr,
    v_scale_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    sinks_ptr,
    slopes_ptr,
    cu_seqlens_ptr,
    kv_lens_ptr,
    page_indices_ptr,
    page_indptr_ptr,
    page_start_ptr,
    num_tokens,
    num_seqs,
    num_splits,
    least_keys,
    whole_keys,
    q_stride_t,
    q_stride_h,
    q_stride_d,
    k_stride_p,
    k_stride_s,
    k_stride_h,
    k_stride_d,
    v_stride_p,
    v_stride_s,
    v_stride_h,
    v_stride_d,
    MOST_QUERIES: tl.constexpr,
    LEAST_QUERIES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile (see `small_tile`), one key head, and one of `num_splits` parts of the tile's keys.

    A part has `least_keys` or more, and up to `whole_keys` are one: how many parts there are depends on the keys that
    the tile sees. Where it is one, its program writes the result. Else each writes the sums of its weighted values,
    partial [rows, H, splits, Dv], and the highest score and the total of its weights, weight [rows, H, splits, 2]. A
    row belongs to a token, or with MOST_QUERIES (of 1) to a sequence.
    """
    let_next_begin(PDL)
    if not EARLY:
        wait_for_previous(PDL)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    GROUPS: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    seq, first_token, first_query, num_queries, first_page, kv_len, page_start, start, end, split = small_tile(
        cu_seqlens_ptr, kv_lens_ptr, page_indptr_ptr, page_start_ptr, num_tokens, num_seqs, num_splits,
        least_keys, whole_keys, MOST_QUERIES, PAGE_SIZE, BLOCK_Q, BLOCK_N, WINDOW, CHUNK, LEAST_QUERIES,
    )  # fmt: skip
    part = tl.program_id(2)
    low = start + part * split
    high = tl.minimum(low + split, end)
    kv_head = tl.program_id(1) // GROUPS
    if AHEAD > 0:  # noqa: SIM102 - a constant: the branch in it is of the device
        if (num_queries > 0) & (low < high):
            _ask_ahead(
                k_ptr + kv_head.to(tl.int64) * k_stride_h, v_ptr + kv_head.to(tl.int64) * v_stride_h,
                page_indices_ptr + first_page, low, high, k_stride_p, k_stride_s, v_stride_p, v_stride_s,
                AHEAD, PAGE_SIZE, SIZE, VALUE_SIZE,
            )  # fmt: skip
    is_idle = (num_queries <= 0) | ((low >= end) & (part > 0))
    if EARLY:
        if is_idle & ~is_first_program():
            return
        wait_for_previous(PDL)
    if is_idle:
        return
    row = tl.arange(0, BLOCK_M)
    query = first_query + row // BLOCK_H
    of_group = tl.program_id(1) % GROUPS * BLOCK_H + row % BLOCK_H
    row_mask = (row // BLOCK_H < BLOCK_Q) & (query < num_queries) & (of_group < GROUP)
    token = (first_token + query).to(tl.int64)
    head = kv_head * GROUP + of_group
    position = kv_len - num_queries + query
    acc, highest, total = sums_of(
        q_ptr, k_ptr, v_ptr, sinks_ptr, slopes_ptr, k_scale_ptr, v_scale_ptr, page_indices_ptr + first_page,
        token, head, kv_head, row_mask, position, part == 0,
        low, low, low, high, page_start,
        q_stride_t, q_stride_h, q_stride_d, k_stride_p, k_stride_s, k_stride_h, k_stride_d,
        v_stride_p, v_stride_s, v_stride_h, v_stride_d,
        True, BLOCK_M, PAGE_SIZE, SIZE, VALUE_SIZE, BLOCK_N, BLOCK_D, BLOCK_V, SCALE, SOFT_CAP, WINDOW, CHUNK,
        PRECISION,
    )  # fmt: skip
    if end - start <= split:
        store_rows(out_ptr, acc, total, token, head, row_mask, HEADS, VALUE_SIZE, BLOCK_V)
    else:
        e = tl.arange(0, BLOCK_V)
        place = ((token if MOST_QUERIES == 0 else seq + 0 * token) * HEADS + head) * num_splits + part
        offsets = place[:, None] * VALUE_SIZE + e[None, :]
        tl.store(partial_ptr + offsets, acc, mask=row_mask[:, None] & (e < VALUE_SIZE)[None, :])
        tl.store(weight_ptr + 2 * place, highest, mask=row_mask)
        tl.store(weight_ptr + 2 * place + 1, total, mask=row_mask)
