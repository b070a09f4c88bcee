"""Attention in Triton: over pages of a cache, and over packed tokens. Nothing is read back to the host.

Rows of a tile are the queries of one sequence, each with the heads that share a key head, so that keys and values are
loaded once for all of them. `context_kernel` takes large tiles, one after the other, each over all of its keys.
`split_kernel` takes small tiles, and spreads the keys of each over several programs; `merge_kernel` joins what these
found. Both leave out keys that no row of a tile sees, and mask only where rows differ in what they see.

Tokens past the last sequence are padding: they are taken as one more sequence, without keys, which makes zeros of them.

Scores are kept in base 2: exp2 is an instruction, exp is not. Keys and values of another type than the query's are
converted to its type as they are loaded: products are those of the activations, however the cache is stored.
"""

# To pyright, Triton's constants don't decide which branch is there, and some functions never return.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.triton_chain import is_first_program, let_next_begin, prefetch, wait_for_previous

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
def _tokens_of(cu_seqlens_ptr, seq, num_seqs, num_tokens):  # type: ignore[no-untyped-def]
    """The first token of a sequence, and how many it has in this step; padding's for sequence `num_seqs`."""
    first = tl.load(cu_seqlens_ptr + seq)
    end = tl.load(cu_seqlens_ptr + seq + 1, mask=seq < num_seqs, other=num_tokens)
    return first, end - first


@triton.jit
def _keys_of(  # type: ignore[no-untyped-def]
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
def _range(  # type: ignore[no-untyped-def]
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

    Without MASKED all rows see all of these keys.
    """
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
        # What makes scores of base 2 of them, as late as possible: with the subtraction it is one instruction.
        factor: tl.constexpr = SCALE * LOG2_E if SOFT_CAP == 0.0 and slope is None else LOG2_E
        distance = position[:, None] - key[None, :]
        if slope is not None:
            scores = scores * SCALE - slope[:, None] * distance
        if SOFT_CAP > 0.0:
            capped = scores if slope is not None else scores * SCALE
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
def _tile(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    sinks_ptr,
    slopes_ptr,
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
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    k_ptr += kv_head.to(tl.int64) * k_stride_h
    v_ptr += kv_head.to(tl.int64) * v_stride_h

    if WINDOW > 0 or CHUNK > 0 or ONE_LOOP:
        acc, highest, total = _over_keys(
            acc, highest, total, q, position, slope, start, end if ONE_LOOP else tl.minimum(full_start, end), end,
            k_ptr, v_ptr, page_indices_ptr, page_start,
            k_stride_p, k_stride_s, k_stride_d, v_stride_p, v_stride_s, v_stride_d,
            True, PAGE_SIZE, SIZE, VALUE_SIZE, BLOCK_N, BLOCK_D, BLOCK_V, SCALE, SOFT_CAP, WINDOW, CHUNK, PRECISION,
        )  # fmt: skip
    if not ONE_LOOP:
        acc, highest, total = _over_keys(
            acc, highest, total, q, position, slope, full_start, full_end, end,
            k_ptr, v_ptr, page_indices_ptr, page_start,
            k_stride_p, k_stride_s, k_stride_d, v_stride_p, v_stride_s, v_stride_d,
            False, PAGE_SIZE, SIZE, VALUE_SIZE, BLOCK_N, BLOCK_D, BLOCK_V, SCALE, SOFT_CAP, WINDOW, CHUNK, PRECISION,
        )  # fmt: skip
        acc, highest, total = _over_keys(
            acc, highest, total, q, position, slope, full_end, end, end,
            k_ptr, v_ptr, page_indices_ptr, page_start,
            k_stride_p, k_stride_s, k_stride_d, v_stride_p, v_stride_s, v_stride_d,
            True, PAGE_SIZE, SIZE, VALUE_SIZE, BLOCK_N, BLOCK_D, BLOCK_V, SCALE, SOFT_CAP, WINDOW, CHUNK, PRECISION,
        )  # fmt: skip
    return acc, highest, total


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    out_ptr, acc, total, token, head, row_mask, HEADS: tl.constexpr, VALUE_SIZE: tl.constexpr, BLOCK_V: tl.constexpr
):
    """Writes a tile's rows of the result [T, H, Dv]."""
    e = tl.arange(0, BLOCK_V)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    offsets = (token * HEADS + head)[:, None] * VALUE_SIZE + e[None, :]
    tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & (e < VALUE_SIZE)[None, :])


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
            first_token, num_queries = _tokens_of(cu_seqlens_ptr, seq, num_seqs, num_tokens)
            first_page, kv_len, num_slots, page_start = _keys_of(
                kv_lens_ptr, page_indptr_ptr, page_start_ptr, seq, num_seqs, num_queries, PAGE_SIZE
            )
            first_query = (end_tile - 1 - tile) * BLOCK_Q
            start, full_start, full_end, end = _range(
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
            acc, highest, total = _tile(
                q_ptr, keys_ptr, values_ptr, sinks_ptr, slopes_ptr, page_list,
                token, head, kv_head, row_mask, position, True, start, full_start, full_end, end, page_start,
                q_stride_t, q_stride_h, q_stride_d, k_stride_p, k_stride_s, k_stride_h, k_stride_d,
                v_stride_p, v_stride_s, v_stride_h, v_stride_d,
                False, BLOCK_M, PAGE_SIZE, SIZE, VALUE_SIZE, BLOCK_N, BLOCK_D, BLOCK_V, SCALE, SOFT_CAP, WINDOW, CHUNK,
                PRECISION,
            )  # fmt: skip
            _store(out_ptr, acc, total, token, head, row_mask, HEADS, VALUE_SIZE, BLOCK_V)
            if sums_ptr is not None:
                sums = highest + tl.log2(tl.where(total == 0.0, 1.0, total))
                tl.store(sums_ptr + token * HEADS + head, sums, mask=row_mask)


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
):
    """What `split_kernel` and `merge_kernel` share: the tile of a program, and how its keys are split.

    With MOST_QUERIES tile `i` is the queries of sequence `i`, if it has no more than so many. Without, the tiles are
    those of all sequences: sequence b owns those from `cu_seqlens[b] // BLOCK_Q + b` on, at least as many as it needs.

    Gives the sequence, its first token, the tile's first query, how many queries the sequence has, or 0 where the
    program has nothing to do; its pages' place, its keys and the position of the first; the keys that the tile sees,
    from `start` to `end`, and how many of them are a part.
    """
    tile = tl.program_id(0)
    if MOST_QUERIES > 0:
        seq = tile
        first_query = 0
        first_token, num_queries = _tokens_of(cu_seqlens_ptr, seq, num_seqs, num_tokens)
        num_queries = tl.where(num_queries <= MOST_QUERIES, num_queries, 0)
    else:
        seq = -1
        for first in range(0, num_seqs + 1, SEQUENCES):
            b = first + tl.arange(0, SEQUENCES)
            bound = tl.load(cu_seqlens_ptr + b, mask=b <= num_seqs, other=0)
            seq += tl.sum(((b <= num_seqs) & (bound // BLOCK_Q + b <= tile)).to(tl.int32), 0)
        first_token, num_queries = _tokens_of(cu_seqlens_ptr, seq, num_seqs, num_tokens)
        first_query = (tile - (first_token // BLOCK_Q + seq)) * BLOCK_Q
        num_queries = tl.where(first_query < num_queries, num_queries, 0)
    first_page, kv_len, num_slots, page_start = _keys_of(
        kv_lens_ptr, page_indptr_ptr, page_start_ptr, seq, num_seqs, num_queries, PAGE_SIZE
    )
    start, _, _, end = _range(first_query, num_queries, kv_len, num_slots, page_start, BLOCK_Q, BLOCK_N, WINDOW, CHUNK)
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
        least_keys, whole_keys, MOST_QUERIES, PAGE_SIZE, BLOCK_Q, BLOCK_N, WINDOW, CHUNK,
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
    acc, highest, total = _tile(
        q_ptr, k_ptr, v_ptr, sinks_ptr, slopes_ptr, page_indices_ptr + first_page,
        token, head, kv_head, row_mask, position, part == 0,
        low, low, low, high, page_start,
        q_stride_t, q_stride_h, q_stride_d, k_stride_p, k_stride_s, k_stride_h, k_stride_d,
        v_stride_p, v_stride_s, v_stride_h, v_stride_d,
        True, BLOCK_M, PAGE_SIZE, SIZE, VALUE_SIZE, BLOCK_N, BLOCK_D, BLOCK_V, SCALE, SOFT_CAP, WINDOW, CHUNK,
        PRECISION,
    )  # fmt: skip
    if end - start <= split:
        _store(out_ptr, acc, total, token, head, row_mask, HEADS, VALUE_SIZE, BLOCK_V)
    else:
        e = tl.arange(0, BLOCK_V)
        place = ((token if MOST_QUERIES == 0 else seq + 0 * token) * HEADS + head) * num_splits + part
        offsets = place[:, None] * VALUE_SIZE + e[None, :]
        tl.store(partial_ptr + offsets, acc, mask=row_mask[:, None] & (e < VALUE_SIZE)[None, :])
        tl.store(weight_ptr + 2 * place, highest, mask=row_mask)
        tl.store(weight_ptr + 2 * place + 1, total, mask=row_mask)


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
        least_keys, whole_keys, MOST_QUERIES, PAGE_SIZE, BLOCK_Q, BLOCK_N, WINDOW, CHUNK,
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
        _store(out_ptr, acc, total, result + one, head + one, one == 0, HEADS, VALUE_SIZE, BLOCK_V)
