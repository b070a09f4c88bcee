"""Latent attention over pages in Triton. Nothing is read back to the host.

Queries of sequences with one query, and all those of small steps, are *absorbed*: multiplied by the key's part of the
weight, after which latents are keys and values of one head, and heads are rows of one product (`split_kernel`).
Longer sequences' own tokens are *expanded* to keys and values of every head, for
`precast.kernels.attention.triton_context`, and what they cached before is absorbed (`prefix_kernel`), a tile of
one head's queries at a time. The products with the weight are `head_product_kernel`'s and `expand_kernel`'s. Formulas:
`precast.kernels.latent_attention.batched`; which launches a step has: `precast.kernels.latent_attention.launches`.

A cache of another type than the query's is converted to its type as it is loaded.
"""

# To pyright, Triton's constants don't decide which branch is there, and some functions never return.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.attention.triton_split import small_tile
from precast.kernels.attention.triton_tiles import LOG2_E, SEQUENCES, weights_of
from precast.kernels.attention.triton_write_kv import rounded
from precast.kernels.triton_chain import wait_for_previous


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def head_product_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    x_ptr,
    weight_ptr,
    cu_seqlens_ptr,
    num_tokens,
    num_seqs,
    x_stride_r,
    x_stride_h,
    x_stride_k,
    MOST_QUERIES: tl.constexpr,
    OF_TOKENS: tl.constexpr,
    TO_TOKENS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    HEADS: tl.constexpr,
    WEIGHT_ROWS: tl.constexpr,
    FIRST_ROW: tl.constexpr,
    LATENT: tl.constexpr,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[r, h] = x[r, h] @ W_h, BLOCK_T rows and BLOCK_N columns of one head: `x` [rows, H, INNER], `y` [rows, H, SIZE].

    W_h is [INNER, SIZE], of `weight` [H * WEIGHT_ROWS, LATENT] the rows from FIRST_ROW on of head h; TRANSPOSED, they
    are its columns. Row `r` is token `r`, or with MOST_QUERIES (of 1) sequence `r`, if it has one query; padding is one
    more sequence. Then `x` and `y` are by token only where OF_TOKENS and TO_TOKENS say so.
    """
    head = tl.program_id(0)
    k = tl.arange(0, BLOCK_K)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    first = (head * WEIGHT_ROWS + FIRST_ROW).to(tl.int64) * LATENT
    offsets = k[:, None] + n[None, :] * LATENT if TRANSPOSED else k[:, None] * LATENT + n[None, :]
    # No kernel of the step writes the weight, or PDL is off: it is on its way while the one in front still runs.
    weight = tl.load(weight_ptr + first + offsets, mask=(k < INNER)[:, None] & (n < SIZE)[None, :], other=0.0)
    wait_for_previous(PDL)
    if MOST_QUERIES > 0:
        token = tl.load(cu_seqlens_ptr + row, mask=row <= num_seqs, other=0)
        end = tl.load(cu_seqlens_ptr + row + 1, mask=row < num_seqs, other=num_tokens)
        exists = (row <= num_seqs) & (end > token) & (end - token <= MOST_QUERIES)
    else:
        token = row
        exists = row < num_tokens
    x_row = (token if OF_TOKENS else row).to(tl.int64)
    y_row = (token if TO_TOKENS else row).to(tl.int64)
    x_offsets = (x_row * x_stride_r + head * x_stride_h)[:, None] + k[None, :] * x_stride_k
    x = tl.load(x_ptr + x_offsets, mask=exists[:, None] & (k < INNER)[None, :], other=0.0)
    y = tl.dot(x, weight, input_precision=PRECISION)
    y_offsets = (y_row * HEADS + head)[:, None] * SIZE + n[None, :]
    tl.store(y_ptr + y_offsets, y.to(y_ptr.dtype.element_ty), mask=exists[:, None] & (n < SIZE)[None, :])


@triton.jit
def _over_latents(  # type: ignore[no-untyped-def]
    acc,
    highest,
    total,
    q,
    q_rope,
    position,
    low,
    high,
    end,
    cache_ptr,
    page_indices_ptr,
    cache_stride_p,
    cache_stride_s,
    MASKED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds the latents from `low` to `high` to the sums of a tile: `q` [M, C] and `q_rope` [M, Dr] are its rows.

    Latents from `end` on don't exist. Without MASKED all rows see all of these.
    """
    c = tl.arange(0, BLOCK_C)
    r = tl.arange(0, BLOCK_R)
    lane = tl.arange(0, BLOCK_N)
    page = tl.load(page_indices_ptr + (low + lane) // PAGE_SIZE, mask=low + lane < end, other=0)
    for first_key in range(low, high, BLOCK_N):
        key = first_key + lane
        exists = key < end
        slot_ptr = cache_ptr + page.to(tl.int64) * cache_stride_p + key % PAGE_SIZE * cache_stride_s
        # The pages of the next step, so that its latents don't wait for them.
        following = key + BLOCK_N
        page = tl.load(page_indices_ptr + following // PAGE_SIZE, mask=following < end, other=0)
        # Slots without a key hold anything, NaN too; a weight of zero would not keep that out of a product.
        latent = tl.load(slot_ptr[:, None] + c[None, :], mask=exists[:, None] & (c < LATENT)[None, :], other=0.0)
        latent = latent.to(q.dtype)
        rope = tl.load(slot_ptr[:, None] + LATENT + r[None, :], mask=exists[:, None] & (r < ROPE)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(latent), input_precision=PRECISION)
        scores = tl.dot(q_rope, tl.trans(rope.to(q.dtype)), scores, input_precision=PRECISION) * (SCALE * LOG2_E)
        if MASKED:
            distance = position[:, None] - key[None, :]
            visible = exists[None, :] & (distance >= 0)
            if WINDOW > 0:
                visible = visible & (distance < WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        weights, fade, highest, total = weights_of(scores, highest, total)
        acc = tl.dot(weights.to(q.dtype), latent, acc * fade[:, None], input_precision=PRECISION)
    return acc, highest, total


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "num_splits", "least_keys", "whole_keys"])
def split_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    partial_ptr,
    weight_ptr,
    q_latent_ptr,
    q_ptr,
    cache_ptr,
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
    cache_stride_p,
    cache_stride_s,
    MOST_QUERIES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_H heads of a tile's queries, and one of `num_splits` parts of its keys, as in attention's `split_kernel`.

    `q_latent`, `y` [rows, H, C], a row for each token, or with MOST_QUERIES for each sequence. Where a tile's keys are
    one part, its program writes `y`. Else each writes the sums of its weighted latents, partial [rows, H, splits, C],
    and the highest score and the total of its weights, weight [rows, H, splits, 2].
    """
    wait_for_previous(PDL)
    seq, first_token, first_query, num_queries, first_page, kv_len, _, start, end, split = small_tile(
        cu_seqlens_ptr, kv_lens_ptr, page_indptr_ptr, page_start_ptr, num_tokens, num_seqs, num_splits,
        least_keys, whole_keys, MOST_QUERIES, PAGE_SIZE, BLOCK_Q, BLOCK_N, WINDOW, 0, 1,
    )  # fmt: skip
    part = tl.program_id(2)
    low = start + part * split
    if num_queries <= 0:
        return
    if (low >= end) & (part > 0):
        return
    high = tl.minimum(low + split, end)
    index = tl.arange(0, BLOCK_M)
    query = first_query + index // BLOCK_H
    head = tl.program_id(1) * BLOCK_H + index % BLOCK_H
    row_mask = (index // BLOCK_H < BLOCK_Q) & (query < num_queries) & (head < HEADS)
    token = (first_token + query).to(tl.int64)
    row = (token if MOST_QUERIES == 0 else seq + 0 * token) * HEADS + head
    c = tl.arange(0, BLOCK_C)
    r = tl.arange(0, BLOCK_R)
    mask = row_mask[:, None] & (c < LATENT)[None, :]
    q = tl.load(q_latent_ptr + row[:, None] * LATENT + c[None, :], mask=mask, other=0.0)
    q_offsets = (token * q_stride_t + head * q_stride_h)[:, None] + (NOPE + r)[None, :] * q_stride_d
    q_rope = tl.load(q_ptr + q_offsets, mask=row_mask[:, None] & (r < ROPE)[None, :], other=0.0)
    acc, highest, total = _over_latents(
        tl.zeros([BLOCK_M, BLOCK_C], tl.float32), tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32), q, q_rope, kv_len - num_queries + query, low, high, high,
        cache_ptr, page_indices_ptr + first_page, cache_stride_p, cache_stride_s,
        True, PAGE_SIZE, LATENT, ROPE, BLOCK_N, BLOCK_C, BLOCK_R, SCALE, WINDOW, PRECISION,
    )  # fmt: skip
    if end - start <= split:
        y = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(y_ptr + row[:, None] * LATENT + c[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        place = row * num_splits + part
        tl.store(partial_ptr + place[:, None] * LATENT + c[None, :], acc, mask=mask)
        tl.store(weight_ptr + 2 * place, highest, mask=row_mask)
        tl.store(weight_ptr + 2 * place + 1, total, mask=row_mask)


@triton.jit
def _tiles_of(  # type: ignore[no-untyped-def]
    cu_seqlens_ptr, kv_lens_ptr, page_start_ptr, first, num_seqs, PREFIX: tl.constexpr, BLOCK_Q: tl.constexpr
):
    """How many tiles the SEQUENCES from `first` on have: none without several queries, and with PREFIX none without
    keys other than theirs."""
    b = first + tl.arange(0, SEQUENCES)
    is_real = b < num_seqs
    first_token = tl.load(cu_seqlens_ptr + b, mask=is_real, other=0)
    queries = tl.load(cu_seqlens_ptr + b + 1, mask=is_real, other=0) - first_token
    has_tiles = queries > 1
    if PREFIX:
        kept = tl.load(kv_lens_ptr + b, mask=is_real, other=0) - tl.load(page_start_ptr + b, mask=is_real, other=0)
        has_tiles = has_tiles & (kept != queries)
    return tl.where(has_tiles, (queries + BLOCK_Q - 1) // BLOCK_Q, 0)


@triton.jit
def _num_tiles(  # type: ignore[no-untyped-def]
    cu_seqlens_ptr, kv_lens_ptr, page_start_ptr, num_seqs, PREFIX: tl.constexpr, BLOCK_Q: tl.constexpr
):
    """Of all sequences."""
    found = 0
    for first in range(0, num_seqs, SEQUENCES):
        found += tl.sum(_tiles_of(cu_seqlens_ptr, kv_lens_ptr, page_start_ptr, first, num_seqs, PREFIX, BLOCK_Q), 0)
    return found


@triton.jit
def _find_tile(  # type: ignore[no-untyped-def]
    cu_seqlens_ptr, kv_lens_ptr, page_start_ptr, num_seqs, tile, PREFIX: tl.constexpr, BLOCK_Q: tl.constexpr
):
    """A tile's sequence and first query."""
    seq = 0
    begin = 0
    before = 0
    for first in range(0, num_seqs, SEQUENCES):
        tiles = _tiles_of(cu_seqlens_ptr, kv_lens_ptr, page_start_ptr, first, num_seqs, PREFIX, BLOCK_Q)
        ends = before + tl.cumsum(tiles, 0)
        seq += tl.sum((ends <= tile).to(tl.int32), 0)
        begin = tl.maximum(begin, tl.max(tl.where(ends <= tile, ends, 0), 0))
        before += tl.sum(tiles, 0)
    return seq, (tile - begin) * BLOCK_Q


@triton.jit(do_not_specialize=["num_seqs"])
def expand_kernel(  # type: ignore[no-untyped-def]
    k_ptr,
    v_ptr,
    cache_ptr,
    weight_ptr,
    cu_seqlens_ptr,
    kv_lens_ptr,
    page_indices_ptr,
    page_indptr_ptr,
    page_start_ptr,
    num_seqs,
    cache_stride_p,
    cache_stride_s,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    VALUE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Keys [T, H, Dn + Dr] and values [T, H, Dv] of this step's own tokens, as the cache holds their latents.

    The programs share the tiles: BLOCK_T tokens of a sequence of several queries, and BLOCK_N of the elements that a
    head's rows of the weight make. Tiles with the same part of the weight follow one another.
    """
    wait_for_previous(PDL)
    PARTS: tl.constexpr = (NOPE + VALUE + BLOCK_N - 1) // BLOCK_N
    num_tiles = _num_tiles(cu_seqlens_ptr, kv_lens_ptr, page_start_ptr, num_seqs, False, BLOCK_T)
    for item in range(tl.program_id(0), num_tiles * (HEADS * PARTS), tl.num_programs(0)):
        tile = item % num_tiles
        part = item // num_tiles % PARTS
        head = item // num_tiles // PARTS
        seq, first_query = _find_tile(cu_seqlens_ptr, kv_lens_ptr, page_start_ptr, num_seqs, tile, False, BLOCK_T)
        first_token = tl.load(cu_seqlens_ptr + seq)
        num_queries = tl.load(cu_seqlens_ptr + seq + 1) - first_token
        query = first_query + tl.arange(0, BLOCK_T)
        first_page = tl.load(page_indptr_ptr + seq)
        num_slots = (tl.load(page_indptr_ptr + seq + 1) - first_page) * PAGE_SIZE
        position = tl.load(kv_lens_ptr + seq) - tl.load(page_start_ptr + seq) - num_queries + query
        is_query = query < num_queries
        # A token before the sequence's first key has none: zeros, which nothing looks at.
        exists = is_query & (position >= 0) & (position < num_slots)
        page = tl.load(page_indices_ptr + first_page + position // PAGE_SIZE, mask=exists, other=0).to(tl.int64)
        slot_ptr = cache_ptr + page * cache_stride_p + position % PAGE_SIZE * cache_stride_s
        n = part * BLOCK_N + tl.arange(0, BLOCK_N)
        n_mask = n < NOPE + VALUE
        rows_ptr = weight_ptr + (head * (NOPE + VALUE) + n).to(tl.int64) * LATENT
        made = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
        for first in range(0, LATENT, BLOCK_K):
            c = first + tl.arange(0, BLOCK_K)
            latent = tl.load(slot_ptr[:, None] + c[None, :], mask=exists[:, None] & (c < LATENT)[None, :], other=0.0)
            weight = tl.load(rows_ptr[None, :] + c[:, None], mask=n_mask[None, :] & (c < LATENT)[:, None], other=0.0)
            made = tl.dot(latent.to(weight.dtype), weight, made, input_precision=PRECISION)
        place = (first_token + query).to(tl.int64) * HEADS + head
        made = made.to(k_ptr.dtype.element_ty)
        keys_ptr = k_ptr + place * (NOPE + ROPE)
        tl.store(keys_ptr[:, None] + n[None, :], made, mask=is_query[:, None] & (n < NOPE)[None, :])
        is_value = is_query[:, None] & ((n >= NOPE) & n_mask)[None, :]
        tl.store(v_ptr + place[:, None] * VALUE + (n - NOPE)[None, :], made, mask=is_value)
        if part == 0:
            r = tl.arange(0, BLOCK_R)
            is_rope = (r < ROPE)[None, :]
            rope = tl.load(slot_ptr[:, None] + LATENT + r[None, :], mask=exists[:, None] & is_rope, other=0.0)
            rope = rope.to(k_ptr.dtype.element_ty)
            tl.store(keys_ptr[:, None] + NOPE + r[None, :], rope, mask=is_query[:, None] & is_rope)


@triton.jit(do_not_specialize=["num_seqs"])
def prefix_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    own_ptr,
    q_ptr,
    cache_ptr,
    weight_ptr,
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
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    VALUE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Joins what was cached before this step to `out` [T, H, Dv], which holds attention to the step's own tokens.

    `own` [T, H]: the logarithm, to base 2, of the sum of the exponentials of their scores. The programs share the
    tiles: BLOCK_M queries of one head. A sequence with fewer keys than queries is computed anew: its first queries see
    none.
    """
    wait_for_previous(PDL)
    num_tiles = _num_tiles(cu_seqlens_ptr, kv_lens_ptr, page_start_ptr, num_seqs, True, BLOCK_M)
    for item in range(tl.program_id(0), num_tiles * HEADS, tl.num_programs(0)):
        head = item % HEADS  # pyright: ignore[reportOperatorIssue]
        seq, first_query = _find_tile(
            cu_seqlens_ptr, kv_lens_ptr, page_start_ptr, num_seqs, item // HEADS, True, BLOCK_M
        )
        first_token = tl.load(cu_seqlens_ptr + seq)
        num_queries = tl.load(cu_seqlens_ptr + seq + 1) - first_token
        first_page = tl.load(page_indptr_ptr + seq)
        num_slots = (tl.load(page_indptr_ptr + seq + 1) - first_page) * PAGE_SIZE
        kv_len = tl.load(kv_lens_ptr + seq) - tl.load(page_start_ptr + seq)
        prefix = kv_len - num_queries
        query = first_query + tl.arange(0, BLOCK_M)
        row_mask = query < num_queries
        token = (first_token + query).to(tl.int64)
        place = token * HEADS + head

        q_ptrs = q_ptr + token * q_stride_t + head * q_stride_h
        rows_ptr = weight_ptr + (head * (NOPE + VALUE)).to(tl.int64) * LATENT
        c = tl.arange(0, BLOCK_C)
        r = tl.arange(0, BLOCK_R)
        d = tl.arange(0, BLOCK_D)
        q = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
        for first_d in range(0, NOPE, BLOCK_D):
            in_head = first_d + d < NOPE
            q_ptrs_d = q_ptrs[:, None] + (first_d + d)[None, :] * q_stride_d
            nope = tl.load(q_ptrs_d, mask=row_mask[:, None] & in_head[None, :], other=0.0)
            keys_ptr = rows_ptr + (first_d + d)[:, None] * LATENT + c[None, :]
            weight = tl.load(keys_ptr, mask=in_head[:, None] & (c < LATENT)[None, :], other=0.0)
            q = tl.dot(nope, weight, q, input_precision=PRECISION)
        q = q.to(q_ptr.dtype.element_ty)
        q_ptrs_r = q_ptrs[:, None] + (NOPE + r)[None, :] * q_stride_d
        q_rope = tl.load(q_ptrs_r, mask=row_mask[:, None] & (r < ROPE)[None, :], other=0.0)

        # Every query sees all that was cached before, where there is no window.
        end = tl.minimum(tl.where(prefix > 0, prefix, tl.maximum(kv_len, 0)), num_slots)
        full_end = tl.where(prefix > 0, end // BLOCK_N * BLOCK_N, 0)
        start = 0
        if WINDOW > 0:
            start = tl.maximum(prefix + first_query - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
            start = tl.minimum(start, (end + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
            full_end = start
        acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if WINDOW == 0:
            acc, highest, total = _over_latents(
                acc, highest, total, q, q_rope, prefix + query, 0, full_end, end,
                cache_ptr, page_indices_ptr + first_page, cache_stride_p, cache_stride_s,
                False, PAGE_SIZE, LATENT, ROPE, BLOCK_N, BLOCK_C, BLOCK_R, SCALE, WINDOW, PRECISION,
            )  # fmt: skip
        acc, highest, total = _over_latents(
            acc, highest, total, q, q_rope, prefix + query, full_end, end, end,
            cache_ptr, page_indices_ptr + first_page, cache_stride_p, cache_stride_s,
            True, PAGE_SIZE, LATENT, ROPE, BLOCK_N, BLOCK_C, BLOCK_R, SCALE, WINDOW, PRECISION,
        )  # fmt: skip

        own = tl.load(own_ptr + place, mask=row_mask, other=float("-inf"))
        own = tl.where(prefix > 0, own, float("-inf"))
        new_highest = tl.maximum(highest, own)
        reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        fade = tl.exp2(highest - reference)
        own_weight = tl.exp2(own - reference)
        joined = total * fade + own_weight
        joined = tl.where(joined == 0.0, 1.0, joined)
        y = (acc * (fade / joined)[:, None]).to(q_ptr.dtype.element_ty)
        own_weight = own_weight / joined
        for first_e in range(0, VALUE, BLOCK_D):
            e = first_e + d
            values_ptr = rows_ptr + (NOPE + e)[None, :] * LATENT + c[:, None]
            weight = tl.load(values_ptr, mask=(e < VALUE)[None, :] & (c < LATENT)[:, None], other=0.0)
            out_ptrs = out_ptr + place[:, None] * VALUE + e[None, :]
            mask = row_mask[:, None] & (e < VALUE)[None, :]
            before_it = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
            new = tl.dot(y, weight, before_it * own_weight[:, None], input_precision=PRECISION)
            tl.store(out_ptrs, new.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def write_latent_kernel(  # type: ignore[no-untyped-def]
    latent_ptr,
    rope_ptr,
    cache_ptr,
    slot_mapping_ptr,
    num_slots,
    latent_stride_t,
    latent_stride_c,
    rope_stride_t,
    rope_stride_r,
    cache_stride_p,
    cache_stride_s,
    cache_stride_c,
    slot_mapping_stride,
    PAGE_SIZE: tl.constexpr,
    RATE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """`precast.write_latent`, a token a program. A slot outside of the cache is taken like padding: never written.

    A cache with a slot for each RATE tokens is given what stands at the last of these.
    """
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token * slot_mapping_stride)
    is_last = (slot + 1) % RATE == 0
    slot = tl.where(slot >= 0, slot // RATE, -1)
    if is_last & (slot >= 0) & (slot < num_slots):
        c = tl.arange(0, BLOCK_C)
        r = tl.arange(0, BLOCK_R)
        dtype: tl.constexpr = cache_ptr.dtype.element_ty
        slot_ptr = cache_ptr + slot // PAGE_SIZE * cache_stride_p + slot % PAGE_SIZE * cache_stride_s
        latent = tl.load(latent_ptr + token * latent_stride_t + c * latent_stride_c, mask=c < LATENT)
        tl.store(slot_ptr + c * cache_stride_c, rounded(latent, None, dtype, LIMIT), mask=c < LATENT)
        rope = tl.load(rope_ptr + token * rope_stride_t + r * rope_stride_r, mask=r < ROPE)
        tl.store(slot_ptr + (LATENT + r) * cache_stride_c, rounded(rope, None, dtype, LIMIT), mask=r < ROPE)
