"""Attention in Triton: over pages of a cache, and over packed tokens. Nothing is read back to the host.

What its kernels share. Rows of a tile are the queries of one sequence, each with the heads that share a key head, so
that keys and values are loaded once for all of them. `context_kernel` takes large tiles, one after the other, each over
all of its keys. `split_kernel` takes small tiles, and spreads the keys of each over several programs; `merge_kernel`
joins what these found. All leave out keys that no row of a tile sees, and mask only where rows differ in what they see.

Tokens past the last sequence are padding: they are taken as one more sequence, without keys, which makes zeros of them.

Scores are kept in base 2: exp2 is an instruction, exp is not. Keys and values of another type than the query's are
converted to its type as they are loaded: products are those of the activations, however the cache is stored. What keys
were divided by is a factor of the scores, and what values were divided by one of the sums.
"""

# To pyright, Triton's constants don't decide which branch is there, and some functions never return.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
SEQUENCES = tl.constexpr(512)
"""Sequences that a program looks at together, to find the one that it works for."""


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    small = tl.exp(-2.0 * tl.abs(x))
    y = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -y, y)


@triton.jit
def weights_of(scores, highest, total):  # type: ignore[no-untyped-def]
    """Exponentials of scores [M, N] in base 2, for rows that have seen others of at most `highest` [M] before.

    Also the factor by which what was summed over those must be multiplied, and both with the new ones in them: the
    highest and the `total` [M] of the exponentials.
    """
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    # A row that has seen no key yet: -inf less -inf would be NaN.
    reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    fade = tl.exp2(highest - reference)
    weights = tl.exp2(scores - reference[:, None])
    return weights, fade, new_highest, total * fade + tl.sum(weights, 1)


@triton.jit
def tokens_of(cu_seqlens_ptr, seq, num_seqs, num_tokens):  # type: ignore[no-untyped-def]
    """The first token of a sequence, and how many it has in this step; padding's for sequence `num_seqs`."""
    first = tl.load(cu_seqlens_ptr + seq)
    end = tl.load(cu_seqlens_ptr + seq + 1, mask=seq < num_seqs, other=num_tokens)
    return first, end - first


@triton.jit
def keys_of(  # type: ignore[no-untyped-def]
    kv_lens_ptr, page_indptr_ptr, page_start_ptr, seq, num_seqs, num_queries, PAGE_SIZE: tl.constexpr
):
    """A sequence's place in the page lists, its length and the slots that it has, counted from `page_start` on, and
    that. Without pages the keys are those of the sequence's own tokens. Padding has none."""
    is_real = seq < num_seqs
    if page_indptr_ptr is None:
        kv_len = tl.where(is_real, num_queries, 0)
        return 0, kv_len, kv_len, 0
    else:
        first_page = tl.load(page_indptr_ptr + seq)
        end_page = tl.load(page_indptr_ptr + seq + 1, mask=is_real, other=0)
        page_start = tl.load(page_start_ptr + seq, mask=is_real, other=0)
        kv_len = tl.load(kv_lens_ptr + seq, mask=is_real, other=0) - page_start
        return first_page, kv_len, (end_page - first_page) * PAGE_SIZE, page_start


@triton.jit
def range_of(  # type: ignore[no-untyped-def]
    first_query,
    num_queries,
    kv_len,
    num_slots,
    page_start,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The keys that a tile of queries sees: those that some query sees, and among them those that all see.

    Gives `start`, `full_start`, `full_end` and `end`, local; all but the last are multiples of BLOCK_N.
    """
    first = kv_len - num_queries + first_query
    last = kv_len - num_queries + tl.minimum(first_query + BLOCK_Q, num_queries) - 1
    end = tl.maximum(tl.minimum(tl.minimum(kv_len, num_slots), last + 1), 0)
    start = 0
    full_start = 0
    if WINDOW > 0:
        start = first - WINDOW + 1
        full_start = last - WINDOW + 1
    if CHUNK > 0:
        # Chunks are counted in absolute positions.
        start = (first + page_start) // CHUNK * CHUNK - page_start
        full_start = (last + page_start) // CHUNK * CHUNK - page_start
    start = tl.maximum(start, 0) // BLOCK_N * BLOCK_N
    full_start = tl.maximum((tl.maximum(full_start, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N, start)
    full_end = tl.maximum(tl.maximum(tl.minimum(first + 1, end), 0) // BLOCK_N * BLOCK_N, full_start)
    return start, full_start, full_end, end


@triton.jit
def _over_keys(  # type: ignore[no-untyped-def]
    acc,
    highest,
    total,
    q,
    position,
    slope,
    k_scale,
    low,
    high,
    end,
    k_ptr,
    v_ptr,
    page_indices_ptr,
    page_start,
    k_stride_p,
    k_stride_s,
    k_stride_d,
    v_stride_p,
    v_stride_s,
    v_stride_d,
    MASKED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds the keys from `low` to `high` to the sums of a tile. Those from `end` on don't exist.

    Without MASKED all rows see all of these keys. `k_scale`: what keys were divided by, or None.
    """
    # What makes scores of base 2 of products, as late as possible: with the subtraction it is one instruction.
    if k_scale is None:
        scale: tl.constexpr = SCALE
        factor: tl.constexpr = SCALE * LOG2_E if SOFT_CAP == 0.0 and slope is None else LOG2_E
    else:
        scale = SCALE * k_scale
        factor = scale * LOG2_E if SOFT_CAP == 0.0 and slope is None else LOG2_E
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_V)
    lane = tl.arange(0, BLOCK_N)
    if page_indices_ptr is not None:
        page = tl.load(page_indices_ptr + (low + lane) // PAGE_SIZE, mask=low + lane < end, other=0)
    for first_key in range(low, high, BLOCK_N):
        key = first_key + lane
        exists = key < end
        if page_indices_ptr is None:
            k_slot = k_ptr + key.to(tl.int64) * k_stride_s
            v_slot = v_ptr + key.to(tl.int64) * v_stride_s
        else:
            k_slot = k_ptr + page.to(tl.int64) * k_stride_p + key % PAGE_SIZE * k_stride_s
            v_slot = v_ptr + page.to(tl.int64) * v_stride_p + key % PAGE_SIZE * v_stride_s
            # The pages of the next step, so that its keys don't wait for them.
            following = key + BLOCK_N
            page = tl.load(page_indices_ptr + following // PAGE_SIZE, mask=following < end, other=0)
        k = _load(k_slot, d, k_stride_d, exists, SIZE, BLOCK_D, MASKED).to(q.dtype)
        v = _load(v_slot, e, v_stride_d, exists, VALUE_SIZE, BLOCK_V, MASKED).to(q.dtype)

        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        distance = position[:, None] - key[None, :]
        if slope is not None:
            scores = scores * scale - slope[:, None] * distance
        if SOFT_CAP > 0.0:
            capped = scores if slope is not None else scores * scale
            scores = SOFT_CAP * _tanh(capped / SOFT_CAP)
        if MASKED:
            visible = exists[None, :] & (distance >= 0)
            if WINDOW > 0:
                visible = visible & (distance < WINDOW)
            if CHUNK > 0:
                chunk_start = (position + page_start) // CHUNK * CHUNK - page_start
                visible = visible & (key[None, :] >= chunk_start[:, None])
            scores = tl.where(visible, scores, float("-inf"))

        new_highest = tl.maximum(highest, tl.max(scores, 1) * factor)
        # A row that has seen no key yet: -inf less -inf would be NaN.
        reference = tl.where(new_highest == float("-inf"), 0.0, new_highest) if MASKED else new_highest
        weights = tl.exp2(scores * factor - reference[:, None])
        fade = tl.exp2(highest - reference)
        total = total * fade + tl.sum(weights, 1)
        highest = new_highest
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return acc, highest, total


@triton.jit
def _load(  # type: ignore[no-untyped-def]
    slot_ptr, d, stride_d, exists, SIZE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
):
    """Rows of SIZE elements, as [N, BLOCK] with zeros behind them, and zeros for those that don't exist."""
    pointers = slot_ptr[:, None] + d[None, :] * stride_d
    # Slots without a key hold anything, NaN too; a weight of zero would not keep that out of a product.
    if MASKED:
        x = tl.load(pointers, mask=exists[:, None] & (d < SIZE)[None, :], other=0.0)
    elif SIZE < BLOCK:
        x = tl.load(pointers, mask=(d < SIZE)[None, :], other=0.0)
    else:
        x = tl.load(pointers)
    return x


@triton.jit
def sums_of(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    sinks_ptr,
    slopes_ptr,
    k_scale_ptr,
    v_scale_ptr,
    page_indices_ptr,
    token,
    head,
    kv_head,
    row_mask,
    position,
    with_sinks,
    start,
    full_start,
    full_end,
    end,
    page_start,
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
    ONE_LOOP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Weighted values [M, V], the highest score [M] and the total weight [M] of a tile's rows over a range of keys.

    Keys before `full_start` and from `full_end` on are masked row by row; with ONE_LOOP all are. Few keys are faster
    so: each loop begins by waiting for its first keys.
    """
    d = tl.arange(0, BLOCK_D)
    q_offsets = token[:, None] * q_stride_t + head[:, None] * q_stride_h + d[None, :] * q_stride_d
    q = tl.load(q_ptr + q_offsets, mask=row_mask[:, None] & (d < SIZE)[None, :], other=0.0)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        # A sink is a key whose value is zero: the sum of weights starts with it.
        sink = tl.load(sinks_ptr + head, mask=row_mask, other=0.0).to(tl.float32) * LOG2_E
        highest = tl.where(with_sinks, sink, highest)
        total = tl.where(with_sinks, 1.0, total)
    slope = None
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + head, mask=row_mask, other=0.0)
    k_scale = k_scale_ptr
    v_scale = v_scale_ptr
    if k_scale_ptr is not None:
        k_scale = tl.load(k_scale_ptr)
        v_scale = tl.load(v_scale_ptr)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    k_ptr += kv_head.to(tl.int64) * k_stride_h
    v_ptr += kv_head.to(tl.int64) * v_stride_h

    if WINDOW > 0 or CHUNK > 0 or ONE_LOOP:
        acc, highest, total = _over_keys(
            acc, highest, total, q, position, slope, k_scale, start,
            end if ONE_LOOP else tl.minimum(full_start, end), end, k_ptr, v_ptr, page_indices_ptr, page_start,
            k_stride_p, k_stride_s, k_stride_d, v_stride_p, v_stride_s, v_stride_d,
            True, PAGE_SIZE, SIZE, VALUE_SIZE, BLOCK_N, BLOCK_D, BLOCK_V, SCALE, SOFT_CAP, WINDOW, CHUNK, PRECISION,
        )  # fmt: skip
    if not ONE_LOOP:
        acc, highest, total = _over_keys(
            acc, highest, total, q, position, slope, k_scale, full_start, full_end, end,
            k_ptr, v_ptr, page_indices_ptr, page_start,
            k_stride_p, k_stride_s, k_stride_d, v_stride_p, v_stride_s, v_stride_d,
            False, PAGE_SIZE, SIZE, VALUE_SIZE, BLOCK_N, BLOCK_D, BLOCK_V, SCALE, SOFT_CAP, WINDOW, CHUNK, PRECISION,
        )  # fmt: skip
        acc, highest, total = _over_keys(
            acc, highest, total, q, position, slope, k_scale, full_end, end, end,
            k_ptr, v_ptr, page_indices_ptr, page_start,
            k_stride_p, k_stride_s, k_stride_d, v_stride_p, v_stride_s, v_stride_d,
            True, PAGE_SIZE, SIZE, VALUE_SIZE, BLOCK_N, BLOCK_D, BLOCK_V, SCALE, SOFT_CAP, WINDOW, CHUNK, PRECISION,
        )  # fmt: skip
    if v_scale is not None:
        acc = acc * v_scale
    return acc, highest, total


@triton.jit
def store_rows(  # type: ignore[no-untyped-def]
    out_ptr, acc, total, token, head, row_mask, HEADS: tl.constexpr, VALUE_SIZE: tl.constexpr, BLOCK_V: tl.constexpr
):
    """Writes a tile's rows of the result [T, H, Dv]."""
    e = tl.arange(0, BLOCK_V)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    offsets = (token * HEADS + head)[:, None] * VALUE_SIZE + e[None, :]
    tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & (e < VALUE_SIZE)[None, :])
