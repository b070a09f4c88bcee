"""Attention of prompts on Hopper, in Gluon: products run while the exponentials of the next keys are computed.

The tiles are those of `precast.kernels.attention.triton_context`, and so are the results but for rounding.
Triton waits for each product of scores before it goes on, and tensor cores stand still meanwhile. Here a step asks for
the scores of its keys and for the values of the keys before, and computes exponentials as soon as the scores are there:

    scores of j      |######|                    |######|
    values of j - 1         |######|                    |######|       tensor cores
    exponentials of j       |=============|             |==========    other units
    keys of j + 2 on their way   ..............................

Keys and values come by asynchronous copies of 16 bytes, so pages lie anywhere. Types are those that products take.
"""

# To pyright, constants of a kernel decide no branch, and are neither numbers nor layouts; some functions never return.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from precast.kernels import triton_chain
from precast.kernels.attention import triton_tiles

LOG2_E = gl.constexpr(1.4426950408889634)
SEQUENCES = gl.constexpr(512)
"""Sequences that a program looks at together, to find the one that it works for."""

_wait_for_previous = gluon.jit(triton_chain.wait_for_previous.fn)
_let_next_begin = gluon.jit(triton_chain.let_next_begin.fn)
_tokens_of = gluon.jit(triton_tiles.tokens_of.fn)
_keys_of = gluon.jit(triton_tiles.keys_of.fn)
_range_of = gluon.jit(triton_tiles.range_of.fn)


@gluon.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    small = gl.exp(-2.0 * gl.abs(x))
    y = (1.0 - small) / (1.0 + small)
    return gl.where(x < 0, -y, y)


@gluon.jit
def _add(x, y):  # type: ignore[no-untyped-def]
    return x + y


@gluon.jit
def _tiles_of(  # type: ignore[no-untyped-def]
    cu_seqlens_ptr, first, num_seqs, num_tokens, LEAST_QUERIES: gl.constexpr, BLOCK_Q: gl.constexpr
):
    """How many tiles the SEQUENCES from `first` on have: none where they have less than LEAST_QUERIES."""
    layout: gl.constexpr = gl.BlockedLayout([SEQUENCES // (32 * gl.num_warps())], [32], [gl.num_warps()], [0])
    b = first + gl.arange(0, SEQUENCES, layout=layout)
    bound = gl.load(cu_seqlens_ptr + b, mask=b <= num_seqs, other=num_tokens)
    queries = gl.load(cu_seqlens_ptr + b + 1, mask=b < num_seqs, other=num_tokens) - bound
    return gl.where(queries >= LEAST_QUERIES, (queries + BLOCK_Q - 1) // BLOCK_Q, 0)


@gluon.jit
def _page_of(  # type: ignore[no-untyped-def]
    page_list,
    first_key,
    end,
    HAS_KEYS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    NEIGHBOURS: gl.constexpr,
    GROUPED: gl.constexpr,
):
    """The page of each group of neighbours among a step's keys; anything without pages, or where there are no keys."""
    key = first_key + NEIGHBOURS * gl.arange(0, BLOCK_N // NEIGHBOURS, layout=gl.SliceLayout(1, GROUPED))
    if page_list is None:
        return key
    elif HAS_KEYS:
        # Of the last key where there is none: a mask would be a branch.
        return gl.load(page_list + gl.minimum(key, end - 1) // PAGE_SIZE)
    else:
        return gl.load(page_list + key // PAGE_SIZE, mask=key < end, other=0)


@gluon.jit
def _request(  # type: ignore[no-untyped-def]
    shared,
    ptr,
    page,
    first_key,
    end,
    stride_p,
    stride_s,
    HAS_PAGES: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    NEIGHBOURS: gl.constexpr,
    GROUPED: gl.constexpr,
    COPY: gl.constexpr,
):
    """Asks for the keys of a step, or for its values; for zeros where there are none."""
    first = first_key + NEIGHBOURS * gl.arange(0, BLOCK_N // NEIGHBOURS, layout=gl.SliceLayout(1, GROUPED))
    if HAS_PAGES:  # noqa: SIM108 - types differ between the branches of a constant
        start = page.to(gl.int64) * stride_p + first % PAGE_SIZE * stride_s
    else:
        start = first.to(gl.int64) * stride_s
    each = gl.arange(0, NEIGHBOURS, layout=gl.SliceLayout(0, GROUPED)) * stride_s
    rows = gl.convert_layout(gl.reshape(start[:, None] + each[None, :], [BLOCK_N]), gl.SliceLayout(1, COPY))
    # The compiler can't see it through the new shape: keys are whole heads, at multiples of 16 bytes.
    rows = gl.multiple_of(rows, 8)
    key = first_key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, COPY))
    d = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, COPY))
    async_copy.async_copy_global_to_shared(shared, ptr + (rows[:, None] + d[None, :]), (key < end)[:, None])


@gluon.jit
def _softmax(  # type: ignore[no-untyped-def]
    scores,
    highest,
    total,
    position,
    slope,
    first_key,
    end,
    page_start,
    MASKED: gl.constexpr,
    SCORES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SCALE: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    WINDOW: gl.constexpr,
    CHUNK: gl.constexpr,
):
    """Weights of a step's keys, the factor for what was summed before, and the highest score and total with them."""
    key = first_key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    # What makes scores of base 2 of them, as late as possible: with the subtraction it is one instruction.
    factor: gl.constexpr = SCALE * LOG2_E if SOFT_CAP == 0.0 and slope is None else LOG2_E
    if slope is not None:
        scores = scores * SCALE - slope[:, None] * (position[:, None] - key[None, :])
    if SOFT_CAP > 0.0:
        capped = scores if slope is not None else scores * SCALE
        scores = SOFT_CAP * _tanh(capped / SOFT_CAP)
    if MASKED:
        distance = position[:, None] - key[None, :]
        visible = (key < end)[None, :] & (distance >= 0)
        if WINDOW > 0:
            visible = visible & (distance < WINDOW)
        if CHUNK > 0:
            chunk_start = (position + page_start) // CHUNK * CHUNK - page_start
            visible = visible & (key[None, :] >= chunk_start[:, None])
        scores = gl.where(visible, scores, float("-inf"))
    new_highest = gl.maximum(highest, gl.max(scores, 1) * factor)
    # A row that has seen no key yet: -inf less -inf would be NaN.
    reference = gl.where(new_highest == float("-inf"), 0.0, new_highest) if MASKED else new_highest
    weights = gl.exp2(scores * factor - reference[:, None])
    fade = gl.exp2(highest - reference)
    return weights, fade, new_highest, total * fade + gl.sum(weights, 1)


@gluon.jit
def _steps(  # type: ignore[no-untyped-def]
    first_step,
    end_step,
    acc,
    p,
    highest,
    total,
    page,
    position,
    slope,
    start,
    end,
    page_start,
    q_shared,
    k_shared,
    v_shared,
    no_scores,
    keys_ptr,
    values_ptr,
    page_list,
    k_stride_p,
    k_stride_s,
    v_stride_p,
    v_stride_s,
    MASKED: gl.constexpr,
    HAS_PAGES: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    NEIGHBOURS: gl.constexpr,
    STAGES: gl.constexpr,
    SCALE: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    WINDOW: gl.constexpr,
    CHUNK: gl.constexpr,
    SCORES: gl.constexpr,
    VALUES: gl.constexpr,
    GROUPED: gl.constexpr,
    COPY: gl.constexpr,
):
    """Adds the values of the steps before those from `first_step` to `end_step`, and computes the weights of these.

    Without MASKED all rows see all keys of these steps. There is no branch within a step: the assembler would wait for
    all products in front of it.
    """
    for step in range(first_step, end_step):
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        keys = k_shared.index(step % STAGES).permute((1, 0))
        scores = warpgroup_mma(q_shared, keys, no_scores, use_acc=False, is_async=True)
        acc = warpgroup_mma(p, v_shared.index((step - 1) % (STAGES + 1)), acc, is_async=True)
        # All warps are done with the keys of the step before, and with the values of the one before that.
        ahead = step + STAGES - 1
        first_key = start + ahead * BLOCK_N
        _request(
            k_shared.index(ahead % STAGES), keys_ptr, page, first_key, end, k_stride_p, k_stride_s,
            HAS_PAGES, PAGE_SIZE, BLOCK_N, BLOCK_D, NEIGHBOURS, GROUPED, COPY,
        )  # fmt: skip
        _request(
            v_shared.index(ahead % (STAGES + 1)), values_ptr, page, first_key, end, v_stride_p, v_stride_s,
            HAS_PAGES, PAGE_SIZE, BLOCK_N, BLOCK_D, NEIGHBOURS, GROUPED, COPY,
        )  # fmt: skip
        async_copy.commit_group()
        page = _page_of(page_list, first_key + BLOCK_N, end, True, BLOCK_N, PAGE_SIZE, NEIGHBOURS, GROUPED)
        scores = warpgroup_mma_wait(1, [scores])
        weights, fade, highest, total = _softmax(
            scores, highest, total, position, slope, start + step * BLOCK_N, end, page_start, MASKED,
            SCORES, BLOCK_N, SCALE, SOFT_CAP, WINDOW, CHUNK,
        )  # fmt: skip
        p = gl.convert_layout(weights.to(p.dtype), gl.DotOperandLayout(0, VALUES, 2))
        # With the weights, or the compiler would compute them after it has waited.
        acc, p = warpgroup_mma_wait(0, [acc, p])
        acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, VALUES))[:, None]
    return acc, p, highest, total, page


@gluon.jit
def _rows(  # type: ignore[no-untyped-def]
    first_query,
    num_queries,
    first_token,
    group,
    kv_head,
    LAYOUT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_H: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Of a tile's rows: the query in its sequence, its token, the head, and whether there is such a row."""
    row = gl.arange(0, BLOCK_M, layout=LAYOUT)
    query = first_query + row // BLOCK_H
    of_group = group * BLOCK_H + row % BLOCK_H
    exists = (row // BLOCK_H < BLOCK_Q) & (query < num_queries) & (of_group < GROUP)
    return query, (first_token + query).to(gl.int64), kv_head * GROUP + of_group, exists


@gluon.jit(do_not_specialize=["num_tokens", "num_seqs"])
def context_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
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
    LEAST_QUERIES: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    BLOCK_H: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    SCALE: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    WINDOW: gl.constexpr,
    CHUNK: gl.constexpr,
    STAGES: gl.constexpr,
    EARLY: gl.constexpr,
    PDL: gl.constexpr,
):
    """Sequences of LEAST_QUERIES or more. Its programs share the tiles, whose number is known on the device alone.

    A sequence's later queries see more keys, so its last tile comes first; the order in which programs take tiles turns
    round after each, or the first program would have the most work each time.
    """
    _let_next_begin(PDL)
    if not EARLY:
        _wait_for_previous(PDL)
    GROUP: gl.constexpr = HEADS // KV_HEADS
    GROUPS: gl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    HAS_PAGES: gl.constexpr = page_indices_ptr is not None
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = 256 // BLOCK_D
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_D, 16])
    # A thread copies 16 bytes of each of its rows. Those of keys are neighbours, so that they lie in one page.
    EACH: gl.constexpr = BLOCK_N // (LANES * WARPS)
    NEIGHBOURS: gl.constexpr = EACH if EACH < 8 else 8
    COPY_Q: gl.constexpr = gl.BlockedLayout([1, 8], [LANES, BLOCK_D // 8], [WARPS, 1], [1, 0])
    COPY: gl.constexpr = gl.BlockedLayout([NEIGHBOURS, 8], [LANES, BLOCK_D // 8], [WARPS, 1], [1, 0])
    # The same rows as groups of neighbours.
    GROUPED: gl.constexpr = gl.SliceLayout(
        2, gl.BlockedLayout([1, NEIGHBOURS, 8], [LANES, 1, BLOCK_D // 8], [WARPS, 1, 1], [2, 1, 0])
    )
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_D], dtype)
    kv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], dtype)
    q_shared = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_D], q_layout)
    k_shared = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], kv_layout)
    # One more: the values of a step are read while the scores of the next one are computed.
    v_shared = gl.allocate_shared_memory(dtype, [STAGES + 1, BLOCK_N, BLOCK_D], kv_layout)

    num_tiles = 0
    for first in range(0, num_seqs + 1, SEQUENCES):
        num_tiles += gl.sum(_tiles_of(cu_seqlens_ptr, first, num_seqs, num_tokens, LEAST_QUERIES, BLOCK_Q), 0)
    if EARLY:
        _wait_for_previous(PDL)
    num_items = num_tiles * (KV_HEADS * GROUPS)
    program = gl.program_id(0)
    num_programs = gl.num_programs(0)

    for turn in range(0, (num_items + num_programs - 1) // num_programs):
        item = turn * num_programs + gl.where(turn % 2 == 0, program, num_programs - 1 - program)
        if item < num_items:
            tile = item // (KV_HEADS * GROUPS)
            kv_head = item // GROUPS % KV_HEADS
            # The sequences whose tiles all come before this one, and the end of the tiles of the one after these.
            seq = 0
            end_tile = num_tiles
            before = 0
            for first in range(0, num_seqs + 1, SEQUENCES):
                counts = _tiles_of(cu_seqlens_ptr, first, num_seqs, num_tokens, LEAST_QUERIES, BLOCK_Q)
                ends = before + gl.associative_scan(counts, 0, _add)
                seq += gl.sum((ends <= tile).to(gl.int32), 0)
                end_tile = gl.minimum(end_tile, gl.min(gl.where(ends > tile, ends, num_tiles), 0))
                before += gl.sum(counts, 0)
            first_token, num_queries = _tokens_of(cu_seqlens_ptr, seq, num_seqs, num_tokens)
            first_page, kv_len, num_slots, page_start = _keys_of(
                kv_lens_ptr, page_indptr_ptr, page_start_ptr, seq, num_seqs, num_queries, PAGE_SIZE
            )
            first_query = (end_tile - 1 - tile) * BLOCK_Q
            start, full_start, full_end, end = _range_of(
                first_query, num_queries, kv_len, num_slots, page_start, BLOCK_Q, BLOCK_N, WINDOW, CHUNK
            )
            num_steps = (gl.maximum(end - start, 0) + BLOCK_N - 1) // BLOCK_N
            keys_ptr = k_ptr + gl.to_tensor(kv_head).to(gl.int64) * k_stride_h
            values_ptr = v_ptr + gl.to_tensor(kv_head).to(gl.int64) * v_stride_h
            if HAS_PAGES:
                page_list = page_indices_ptr + first_page
            else:
                page_list = None
                keys_ptr += gl.to_tensor(first_token).to(gl.int64) * k_stride_s
                values_ptr += gl.to_tensor(first_token).to(gl.int64) * v_stride_s

            # All warps have read what earlier tiles left in shared memory: each has waited for its products, and
            # finding this tile took barriers.
            page = _page_of(page_list, start, end, False, BLOCK_N, PAGE_SIZE, NEIGHBOURS, GROUPED)
            _, token, head, exists = _rows(
                first_query, num_queries, first_token, item % GROUPS, kv_head, gl.SliceLayout(1, COPY_Q),
                BLOCK_M, BLOCK_H, BLOCK_Q, GROUP,
            )  # fmt: skip
            d = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, COPY_Q))
            q_offsets = (token * q_stride_t + head * q_stride_h)[:, None] + d[None, :] * q_stride_d
            q_shared.store(gl.load(q_ptr + q_offsets, mask=exists[:, None], other=0.0))
            for step in gl.static_range(STAGES - 1):
                first_key = start + step * BLOCK_N
                _request(
                    k_shared.index(step), keys_ptr, page, first_key, end, k_stride_p, k_stride_s,
                    HAS_PAGES, PAGE_SIZE, BLOCK_N, BLOCK_D, NEIGHBOURS, GROUPED, COPY,
                )  # fmt: skip
                _request(
                    v_shared.index(step), values_ptr, page, first_key, end, v_stride_p, v_stride_s,
                    HAS_PAGES, PAGE_SIZE, BLOCK_N, BLOCK_D, NEIGHBOURS, GROUPED, COPY,
                )  # fmt: skip
                async_copy.commit_group()
                page = _page_of(page_list, first_key + BLOCK_N, end, False, BLOCK_N, PAGE_SIZE, NEIGHBOURS, GROUPED)

            query, token, head, exists = _rows(
                first_query, num_queries, first_token, item % GROUPS, kv_head, gl.SliceLayout(1, SCORES),
                BLOCK_M, BLOCK_H, BLOCK_Q, GROUP,
            )  # fmt: skip
            position = kv_len - num_queries + query
            highest = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
            total = gl.full([BLOCK_M], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
            if sinks_ptr is not None:
                # A sink is a key whose value is zero: the sum of weights starts with it.
                highest = gl.load(sinks_ptr + head, mask=exists, other=0.0).to(gl.float32) * LOG2_E
                total = gl.full([BLOCK_M], 1.0, gl.float32, gl.SliceLayout(1, SCORES))
            slope = None
            if slopes_ptr is not None:
                slope = gl.load(slopes_ptr + head, mask=exists, other=0.0)
            acc = gl.full([BLOCK_M, BLOCK_D], 0.0, gl.float32, VALUES)
            no_scores = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, SCORES)
            # The first step's scores, and the request of the step that the loop doesn't make.
            async_copy.wait_group(STAGES - 2)
            fence_async_shared()
            scores = warpgroup_mma(q_shared, k_shared.index(0).permute((1, 0)), no_scores, use_acc=False, is_async=True)
            first_key = start + (STAGES - 1) * BLOCK_N
            _request(
                k_shared.index(STAGES - 1), keys_ptr, page, first_key, end, k_stride_p, k_stride_s,
                HAS_PAGES, PAGE_SIZE, BLOCK_N, BLOCK_D, NEIGHBOURS, GROUPED, COPY,
            )  # fmt: skip
            _request(
                v_shared.index(STAGES - 1), values_ptr, page, first_key, end, v_stride_p, v_stride_s,
                HAS_PAGES, PAGE_SIZE, BLOCK_N, BLOCK_D, NEIGHBOURS, GROUPED, COPY,
            )  # fmt: skip
            async_copy.commit_group()
            page = _page_of(page_list, first_key + BLOCK_N, end, False, BLOCK_N, PAGE_SIZE, NEIGHBOURS, GROUPED)
            scores = warpgroup_mma_wait(0, [scores])
            weights, _, highest, total = _softmax(
                scores, highest, total, position, slope, start, end, page_start, True,
                SCORES, BLOCK_N, SCALE, SOFT_CAP, WINDOW, CHUNK,
            )  # fmt: skip
            p = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, VALUES, 2))

            full_step = (full_start - start) // BLOCK_N
            edge_step = (full_end - start) // BLOCK_N
            if WINDOW > 0 or CHUNK > 0:
                acc, p, highest, total, page = _steps(
                    1, gl.minimum(full_step, num_steps), acc, p, highest, total, page, position, slope,
                    start, end, page_start, q_shared, k_shared, v_shared, no_scores, keys_ptr, values_ptr, page_list,
                    k_stride_p, k_stride_s, v_stride_p, v_stride_s,
                    True, HAS_PAGES, PAGE_SIZE, BLOCK_N, BLOCK_D, NEIGHBOURS, STAGES, SCALE, SOFT_CAP, WINDOW, CHUNK,
                    SCORES, VALUES, GROUPED, COPY,
                )  # fmt: skip
            acc, p, highest, total, page = _steps(
                gl.maximum(full_step, 1), edge_step, acc, p, highest, total, page, position, slope,
                start, end, page_start, q_shared, k_shared, v_shared, no_scores, keys_ptr, values_ptr, page_list,
                k_stride_p, k_stride_s, v_stride_p, v_stride_s,
                False, HAS_PAGES, PAGE_SIZE, BLOCK_N, BLOCK_D, NEIGHBOURS, STAGES, SCALE, SOFT_CAP, WINDOW, CHUNK,
                SCORES, VALUES, GROUPED, COPY,
            )  # fmt: skip
            acc, p, highest, total, page = _steps(
                gl.maximum(edge_step, 1), num_steps, acc, p, highest, total, page, position, slope,
                start, end, page_start, q_shared, k_shared, v_shared, no_scores, keys_ptr, values_ptr, page_list,
                k_stride_p, k_stride_s, v_stride_p, v_stride_s,
                True, HAS_PAGES, PAGE_SIZE, BLOCK_N, BLOCK_D, NEIGHBOURS, STAGES, SCALE, SOFT_CAP, WINDOW, CHUNK,
                SCORES, VALUES, GROUPED, COPY,
            )  # fmt: skip

            last = gl.maximum(num_steps - 1, 0) % (STAGES + 1)
            acc = warpgroup_mma(p, v_shared.index(last), acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
            async_copy.wait_group(0)
            acc = acc / gl.convert_layout(gl.where(total == 0.0, 1.0, total), gl.SliceLayout(1, VALUES))[:, None]
            _, token, head, exists = _rows(
                first_query, num_queries, first_token, item % GROUPS, kv_head, gl.SliceLayout(1, VALUES),
                BLOCK_M, BLOCK_H, BLOCK_Q, GROUP,
            )  # fmt: skip
            e = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, VALUES))
            offsets = (token * HEADS + head) * BLOCK_D
            gl.store(out_ptr + (offsets[:, None] + e[None, :]), acc.to(dtype), mask=exists[:, None])
