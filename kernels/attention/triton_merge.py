"""What programs found over parts of a tile's keys (`precast.kernels.attention.triton_split`), joined."""

# To pyright, Triton's constants don't decide which branch is there, and some functions never return.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.attention.triton_split import small_tile
from precast.kernels.attention.triton_tiles import store_rows
from precast.kernels.triton_chain import is_first_program, let_next_begin, wait_for_previous


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "num_splits", "least_keys", "whole_keys"])
def merge_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    partial_ptr,
    weight_ptr,
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
    LEAST_QUERIES: tl.constexpr,
    TO_TOKENS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PARTS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Joins the parts of a tile, for one head: y = sum_s 2^(m_s - m) acc_s / sum_s 2^(m_s - m) total_s, m = max_s m_s.

    The tile's rows take turns: sequences that decode have one. PARTS are joined at a time, in order. TO_TOKENS: results
    are by token, else by row of the partial results.
    """
    let_next_begin(PDL)
    if not EARLY:
        wait_for_previous(PDL)
    seq, first_token, first_query, num_queries, _, _, _, start, end, split = small_tile(
        cu_seqlens_ptr, kv_lens_ptr, page_indptr_ptr, page_start_ptr, num_tokens, num_seqs, num_splits,
        least_keys, whole_keys, MOST_QUERIES, PAGE_SIZE, BLOCK_Q, BLOCK_N, WINDOW, CHUNK, LEAST_QUERIES,
    )  # fmt: skip
    is_idle = (num_queries <= 0) | (end - start <= split)
    if EARLY:
        if is_idle & ~is_first_program():
            return
        wait_for_previous(PDL)
    if is_idle:
        return
    head = tl.program_id(1)
    e = tl.arange(0, BLOCK_V)
    num_parts = tl.cdiv(end - start, split)
    for query in range(first_query, tl.minimum(first_query + BLOCK_Q, num_queries)):
        token = (first_token + query).to(tl.int64)
        row = token if MOST_QUERIES == 0 else seq + 0 * token
        place = (row * HEADS + head) * num_splits
        highest = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        acc = tl.zeros([1, BLOCK_V], tl.float32)
        for first in range(0, num_parts, PARTS):
            part = first + tl.arange(0, PARTS)
            exists = part < num_parts
            scores = tl.load(weight_ptr + 2 * (place + part), mask=exists, other=float("-inf"))
            totals = tl.load(weight_ptr + 2 * (place + part) + 1, mask=exists, other=0.0)
            values = tl.load(
                partial_ptr + (place + part)[:, None] * VALUE_SIZE + e[None, :],
                mask=exists[:, None] & (e < VALUE_SIZE)[None, :],
                other=0.0,
            )
            new_highest = tl.maximum(highest, tl.max(scores, 0))
            # A row that sees no key of these parts, nor of those before.
            reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            weights = tl.exp2(scores - reference)
            fade = tl.exp2(highest - reference)
            total = total * fade + tl.sum(totals * weights, 0)
            acc = acc * fade[:, None] + tl.sum(values * weights[:, None], 0)[None, :]
            highest = new_highest
        result = token if TO_TOKENS else row
        one = tl.arange(0, 1)
        store_rows(out_ptr, acc, total, result + one, head + one, one == 0, HEADS, VALUE_SIZE, BLOCK_V)
