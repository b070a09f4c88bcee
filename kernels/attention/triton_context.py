"""Attention of sequences with many queries, in large tiles (`precast.kernels.attention.triton_tiles`)."""

# To pyright, Triton's constants don't decide which branch is there, and some functions never return.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.attention.triton_tiles import SEQUENCES, keys_of, range_of, store_rows, sums_of, tokens_of
from precast.kernels.triton_chain import let_next_begin, wait_for_previous


@triton.jit
def _tiles_of(  # type: ignore[no-untyped-def]
    cu_seqlens_ptr, first, num_seqs, num_tokens, LEAST_QUERIES: tl.constexpr, BLOCK_Q: tl.constexpr
):
    """How many tiles the SEQUENCES from `first` on have: none where they have less than LEAST_QUERIES."""
    b = first + tl.arange(0, SEQUENCES)
    bound = tl.load(cu_seqlens_ptr + b, mask=b <= num_seqs, other=num_tokens)
    queries = tl.load(cu_seqlens_ptr + b + 1, mask=b < num_seqs, other=num_tokens) - bound
    return tl.where(queries >= LEAST_QUERIES, (queries + BLOCK_Q - 1) // BLOCK_Q, 0)


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def context_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    sums_ptr,
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
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sequences of LEAST_QUERIES or more. Its programs share the tiles, whose number is known on the device alone.

    `sums` [T, H] float32, if given, gets the logarithm to base 2 of each row's sum of exponentials.

    A sequence's later queries see more keys, so its last tile comes first; the order in which programs take tiles turns
    round after each, or the first program would have the most work each time.
    """
    let_next_begin(PDL)
    if not EARLY:
        wait_for_previous(PDL)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    GROUPS: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    num_tiles = 0
    for first in range(0, num_seqs + 1, SEQUENCES):
        num_tiles += tl.sum(_tiles_of(cu_seqlens_ptr, first, num_seqs, num_tokens, LEAST_QUERIES, BLOCK_Q), 0)
    if EARLY:
        wait_for_previous(PDL)
    num_items = num_tiles * (KV_HEADS * GROUPS)
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)

    for turn in range(0, tl.cdiv(num_items, num_programs)):
        item = turn * num_programs + tl.where(turn % 2 == 0, program, num_programs - 1 - program)
        if item < num_items:
            tile = item // (KV_HEADS * GROUPS)
            kv_head = item // GROUPS % KV_HEADS
            # The sequences whose tiles all come before this one, and the end of the tiles of the one after these.
            seq = 0
            end_tile = num_tiles
            before = 0
            for first in range(0, num_seqs + 1, SEQUENCES):
                tiles = _tiles_of(cu_seqlens_ptr, first, num_seqs, num_tokens, LEAST_QUERIES, BLOCK_Q)
                ends = before + tl.cumsum(tiles, 0)
                seq += tl.sum((ends <= tile).to(tl.int32), 0)
                end_tile = tl.minimum(end_tile, tl.min(tl.where(ends > tile, ends, num_tiles), 0))
                before += tl.sum(tiles, 0)
            first_token, num_queries = tokens_of(cu_seqlens_ptr, seq, num_seqs, num_tokens)
            first_page, kv_len, num_slots, page_start = keys_of(
                kv_lens_ptr, page_indptr_ptr, page_start_ptr, seq, num_seqs, num_queries, PAGE_SIZE
            )
            first_query = (end_tile - 1 - tile) * BLOCK_Q
            start, full_start, full_end, end = range_of(
                first_query, num_queries, kv_len, num_slots, page_start, BLOCK_Q, BLOCK_N, WINDOW, CHUNK
            )
            row = tl.arange(0, BLOCK_M)
            query = first_query + row // BLOCK_H
            of_group = item % GROUPS * BLOCK_H + row % BLOCK_H
            row_mask = (row // BLOCK_H < BLOCK_Q) & (query < num_queries) & (of_group < GROUP)
            token = (first_token + query).to(tl.int64)
            head = kv_head * GROUP + of_group
            position = kv_len - num_queries + query
            if page_indices_ptr is None:
                page_list = None
                keys_ptr = k_ptr + first_token.to(tl.int64) * k_stride_s
                values_ptr = v_ptr + first_token.to(tl.int64) * v_stride_s
            else:
                page_list = page_indices_ptr + first_page
                keys_ptr = k_ptr
                values_ptr = v_ptr
            acc, highest, total = sums_of(
                q_ptr, keys_ptr, values_ptr, sinks_ptr, slopes_ptr, k_scale_ptr, v_scale_ptr, page_list,
                token, head, kv_head, row_mask, position, True, start, full_start, full_end, end, page_start,
                q_stride_t, q_stride_h, q_stride_d, k_stride_p, k_stride_s, k_stride_h, k_stride_d,
                v_stride_p, v_stride_s, v_stride_h, v_stride_d,
                False, BLOCK_M, PAGE_SIZE, SIZE, VALUE_SIZE, BLOCK_N, BLOCK_D, BLOCK_V, SCALE, SOFT_CAP, WINDOW, CHUNK,
                PRECISION,
            )  # fmt: skip
            store_rows(out_ptr, acc, total, token, head, row_mask, HEADS, VALUE_SIZE, BLOCK_V)
            if sums_ptr is not None:
                sums = highest + tl.log2(tl.where(total == 0.0, 1.0, total))
                tl.store(sums_ptr + token * HEADS + head, sums, mask=row_mask)
