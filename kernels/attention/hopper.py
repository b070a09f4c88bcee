"""Attention of prompts on Hopper, in Gluon: groups of warps with roles of their own.

A program has 128 rows, queries with the heads that share a key head, and three groups of four warps. One brings the
queries of a tile and its keys and values into shared memory, as far ahead as that is large; the two others compute 64
rows each. They share what is brought, so that a key is read from the L2 cache half as often as by tiles of 64 rows, and
wait for each other nowhere else: one multiplies while the other computes exponentials.

    brings     |Q|K0|K1|V0|K2|V1|.. as stages get free .. |Q'|K0'|        the next tile's, while this one ends
    rows 0-63      |S0|  |S1|O0|  |S2|O1|  ...                            S  scores of a step: Q K^T
                     |exp 0|  |exp 1|  |exp 2|                            O  its values added: exp V
    rows 64-127      |S0|  |S1|O0|  |S2|O1|  ...

The tiles are those of `precast.kernels.attention.triton_context`, and so are the results but for rounding. A step asks
for the scores of its keys and for the values of the keys before, and computes exponentials as soon as the scores are
there: where Triton waits for each product of scores, tensor cores stand still. Stages are handed over by barriers in
shared memory: `full` when all copies into a stage have arrived, `empty` when both groups are done with it.
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
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from precast.kernels import triton_chain
from precast.kernels.attention import triton_tiles

LOG2_E = gl.constexpr(1.4426950408889634)
SEQUENCES = gl.constexpr(128)
"""Sequences that a warp looks at together, to find the one that it works for."""
NOTES = gl.constexpr(12)
"""Numbers of a tile that the warps which bring it write down for the others."""
NOTE_STAGES = gl.constexpr(4)
"""A tile is brought while the one before is computed, and that one's predecessor may still be stored."""

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
    """How many tiles the SEQUENCES from `first` on have: none where they have less than LEAST_QUERIES.

    Every warp looks at all of them, so that none waits for another.
    """
    layout: gl.constexpr = gl.BlockedLayout([SEQUENCES // 32], [32], [gl.num_warps()], [0])
    b = first + gl.arange(0, SEQUENCES, layout=layout)
    bound = gl.load(cu_seqlens_ptr + b, mask=b <= num_seqs, other=num_tokens)
    queries = gl.load(cu_seqlens_ptr + b + 1, mask=b < num_seqs, other=num_tokens) - bound
    return gl.where(queries >= LEAST_QUERIES, (queries + BLOCK_Q - 1) // BLOCK_Q, 0)


@gluon.jit
def _place_of(  # type: ignore[no-untyped-def]
    tile, num_tiles, cu_seqlens_ptr, num_seqs, num_tokens, LEAST_QUERIES: gl.constexpr, BLOCK_Q: gl.constexpr
):
    """The sequence of a tile, and the first of the tile's queries in it."""
    seq = 0
    end_tile = num_tiles
    before = 0
    for first in range(0, num_seqs + 1, SEQUENCES):
        counts = _tiles_of(cu_seqlens_ptr, first, num_seqs, num_tokens, LEAST_QUERIES, BLOCK_Q)
        ends = before + gl.associative_scan(counts, 0, _add)
        seq += gl.sum((ends <= tile).to(gl.int32), 0)
        end_tile = gl.minimum(end_tile, gl.min(gl.where(ends > tile, ends, num_tiles), 0))
        before += gl.sum(counts, 0)
    return seq, (end_tile - 1 - tile) * BLOCK_Q


@gluon.jit
def _item_of(turn, program, num_programs):  # type: ignore[no-untyped-def]
    """What a program takes in a turn; the order of programs turns round after each."""
    return turn * num_programs + gl.where(turn % 2 == 0, program, num_programs - 1 - program)


@gluon.jit
def _rows(  # type: ignore[no-untyped-def]
    first_row,
    first_query,
    num_queries,
    first_token,
    group,
    kv_head,
    LAYOUT: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_H: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Of ROWS of a tile: the query in its sequence, its token, the head, and whether there is such a row."""
    row = gl.arange(0, ROWS, layout=LAYOUT)
    if ROWS % BLOCK_H == 0:
        first_query += first_row // BLOCK_H
        exists = row >= 0
    else:
        row += first_row
        exists = row // BLOCK_H < BLOCK_Q
    query = first_query + row // BLOCK_H
    of_group = group * BLOCK_H + row % BLOCK_H
    exists = exists & (query < num_queries) & (of_group < GROUP)
    return query, (first_token + query).to(gl.int64), kv_head * GROUP + of_group, exists


@gluon.jit
def _page_of(  # type: ignore[no-untyped-def]
    page_list,
    first_key,
    end,
    BLOCK_N: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    NEIGHBOURS: gl.constexpr,
    GROUPED: gl.constexpr,
):
    """The page of each group of neighbours among a step's keys."""
    key = first_key + NEIGHBOURS * gl.arange(0, BLOCK_N // NEIGHBOURS, layout=gl.SliceLayout(1, GROUPED))
    return gl.load(page_list + key // PAGE_SIZE, mask=key < end, other=0)


@gluon.jit
def _bring(  # type: ignore[no-untyped-def]
    shared,
    ptr,
    page,
    first_key,
    end,
    stride_p,
    stride_s,
    PAGE_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    NEIGHBOURS: gl.constexpr,
    GROUPED: gl.constexpr,
    COPY: gl.constexpr,
):
    """Asks for the keys of a step, or for its values, and for zeros where there are none."""
    first = first_key + NEIGHBOURS * gl.arange(0, BLOCK_N // NEIGHBOURS, layout=gl.SliceLayout(1, GROUPED))
    start = page.to(gl.int64) * stride_p + first % PAGE_SIZE * stride_s
    each = gl.arange(0, NEIGHBOURS, layout=gl.SliceLayout(0, GROUPED)) * stride_s
    rows = gl.convert_layout(gl.reshape(start[:, None] + each[None, :], [BLOCK_N]), gl.SliceLayout(1, COPY))
    # The compiler can't see it through the new shape: keys are whole heads, at multiples of 16 bytes.
    rows = gl.multiple_of(rows, 8)
    key = first_key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, COPY))
    d = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, COPY))
    async_copy.async_copy_global_to_shared(shared, ptr + (rows[:, None] + d[None, :]), (key < end)[:, None])


@gluon.jit
def _note(notes, i, x):  # type: ignore[no-untyped-def]
    """Writes a number down in shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    notes.index(i).store(gl.full([1], 0, gl.int32, layout) + x)


@gluon.jit
def _noted(notes, i):  # type: ignore[no-untyped-def]
    """What was written down."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.sum(notes.index(i).load(layout), 0)


@gluon.jit
def _bring_all(  # type: ignore[no-untyped-def]
    num_turns,
    num_tiles,
    q_ptr,
    k_ptr,
    v_ptr,
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
    v_stride_p,
    v_stride_s,
    v_stride_h,
    q_shared,
    k_shared,
    v_shared,
    q_full,
    q_empty,
    full,
    empty,
    notes,
    LEAST_QUERIES: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr,
    BLOCK_H: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    WINDOW: gl.constexpr,
    CHUNK: gl.constexpr,
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """The warps that bring queries, keys and values."""
    GROUPS: gl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = 256 // BLOCK_D
    # A thread copies 16 bytes of each of its rows. Those of keys are neighbours, so that they lie in one page.
    EACH: gl.constexpr = BLOCK_N // (LANES * WARPS)
    NEIGHBOURS: gl.constexpr = EACH if EACH < 8 else 8
    COPY_Q: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    COPY: gl.constexpr = gl.BlockedLayout([NEIGHBOURS, 8], [LANES, BLOCK_D // 8], [WARPS, 1], [1, 0])
    # The same rows as groups of neighbours.
    GROUPED: gl.constexpr = gl.SliceLayout(
        2, gl.BlockedLayout([1, NEIGHBOURS, 8], [LANES, 1, BLOCK_D // 8], [WARPS, 1, 1], [2, 1, 0])
    )
    ROWS: gl.constexpr = BLOCK_M // 2
    PARTS: gl.constexpr = BLOCK_D // 64
    _wait_for_previous(PDL)
    program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    done = 0
    for turn in range(0, num_turns):
        item = _item_of(turn, program, num_programs)
        kv_head = item // GROUPS % KV_HEADS
        seq, first_query = _place_of(
            item // (KV_HEADS * GROUPS), num_tiles, cu_seqlens_ptr, num_seqs, num_tokens, LEAST_QUERIES, BLOCK_Q
        )
        first_token, num_queries = _tokens_of(cu_seqlens_ptr, seq, num_seqs, num_tokens)
        first_page, kv_len, num_slots, page_start = _keys_of(
            kv_lens_ptr, page_indptr_ptr, page_start_ptr, seq, num_seqs, num_queries, PAGE_SIZE
        )
        start, full_start, full_end, end = _range_of(
            first_query, num_queries, kv_len, num_slots, page_start, BLOCK_Q, BLOCK_N, WINDOW, CHUNK
        )
        num_steps = gl.maximum(end - start + BLOCK_N - 1, BLOCK_N) // BLOCK_N

        mbarrier.wait(q_empty.index(turn % Q_STAGES), (turn // Q_STAGES & 1) ^ 1)
        for part in range(0, 2 * PARTS):
            _query, token, head, exists = _rows(
                part // PARTS * ROWS, first_query, num_queries, first_token, item % GROUPS, kv_head,
                gl.SliceLayout(1, COPY_Q), ROWS, BLOCK_H, BLOCK_Q, GROUP,
            )  # fmt: skip
            d = part % PARTS * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, COPY_Q))
            q_offsets = (token * q_stride_t + head * q_stride_h)[:, None] + d[None, :] * q_stride_d
            queries = gl.load(q_ptr + q_offsets, mask=exists[:, None], other=0.0)
            q_shared.index(turn % Q_STAGES * (2 * PARTS) + part).store(queries)
        first_note = turn % NOTE_STAGES * NOTES
        _note(notes, first_note, first_token)
        _note(notes, first_note + 1, num_queries)
        _note(notes, first_note + 2, first_query)
        _note(notes, first_note + 3, kv_head)
        _note(notes, first_note + 4, item % GROUPS)
        _note(notes, first_note + 5, kv_len)
        _note(notes, first_note + 6, page_start)
        _note(notes, first_note + 7, start)
        _note(notes, first_note + 8, end)
        _note(notes, first_note + 9, (full_start - start) // BLOCK_N)
        _note(notes, first_note + 10, (full_end - start) // BLOCK_N)
        _note(notes, first_note + 11, num_steps)
        fence_async_shared()
        mbarrier.arrive(q_full.index(turn % Q_STAGES), count=1)

        keys_ptr = k_ptr + gl.to_tensor(kv_head).to(gl.int64) * k_stride_h
        values_ptr = v_ptr + gl.to_tensor(kv_head).to(gl.int64) * v_stride_h
        page_list = page_indices_ptr + first_page
        page = _page_of(page_list, start, end, BLOCK_N, PAGE_SIZE, NEIGHBOURS, GROUPED)
        # A stage has the keys of a step and the values of the step before.
        for step in range(0, num_steps + 1):
            stage = (done + step) % STAGES
            first_key = start + step * BLOCK_N
            following = _page_of(page_list, first_key + BLOCK_N, end, BLOCK_N, PAGE_SIZE, NEIGHBOURS, GROUPED)
            value_key = gl.maximum(first_key - BLOCK_N, start)
            value_page = _page_of(page_list, value_key, end, BLOCK_N, PAGE_SIZE, NEIGHBOURS, GROUPED)
            mbarrier.wait(empty.index(stage), ((done + step) // STAGES & 1) ^ 1)
            if step < num_steps:
                _bring(
                    k_shared.index(stage), keys_ptr, page, first_key, end, k_stride_p, k_stride_s,
                    PAGE_SIZE, BLOCK_N, BLOCK_D, NEIGHBOURS, GROUPED, COPY,
                )  # fmt: skip
            if step > 0:
                _bring(
                    v_shared.index(stage), values_ptr, value_page, value_key, end, v_stride_p, v_stride_s,
                    PAGE_SIZE, BLOCK_N, BLOCK_D, NEIGHBOURS, GROUPED, COPY,
                )  # fmt: skip
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            page = following
        done += num_steps + 1
    async_copy.wait_group(0)


@gluon.jit
def _softmax(  # type: ignore[no-untyped-def]
    scores,
    highest,
    total,
    position,
    last_key,
    slope,
    first_key,
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
        # A thread has the columns 8 i + j and 8 i + j + 1 for a j of its own: what remains of them is constant.
        column = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
        own = (column & 6)[None, :]
        column = (column & -7)[None, :]
        visible = column <= (last_key - first_key)[:, None] - own
        if WINDOW > 0:
            visible = visible & (column > (position - WINDOW - first_key)[:, None] - own)
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
def _pinned(x):  # type: ignore[no-untyped-def]
    """`x`, no number of which is negative, as what the compiler doesn't compute later than here.

    It orders what stores to shared memory and what waits for products; exponentials alone it would compute after that.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred never; .reg .b32 place; mov.b32 place, 0; setp.lt.f32 never, $1, 0f00000000; "
        "@never st.shared.f32 [place], $1; mov.f32 $0, $1; }",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _scores_of(q_shared, first, keys, scores, BLOCK_D: gl.constexpr):  # type: ignore[no-untyped-def]
    """Asks for the products of the queries in the tiles from `first` on with keys; `scores` is zeros."""
    for part in gl.static_range(BLOCK_D // 64):
        of_part = keys.slice(part * 64, 64, 1).permute((1, 0))
        scores = warpgroup_mma(q_shared.index(first + part), of_part, scores, use_acc=part > 0, is_async=True)
    return scores


@gluon.jit
def _steps(  # type: ignore[no-untyped-def]
    first_step,
    end_step,
    acc,
    p,
    highest,
    total,
    done,
    position,
    last_key,
    slope,
    start,
    page_start,
    q_shared,
    first_part,
    k_shared,
    v_shared,
    full,
    empty,
    no_scores,
    MASKED: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
    SCALE: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    WINDOW: gl.constexpr,
    CHUNK: gl.constexpr,
    SCORES: gl.constexpr,
    VALUES: gl.constexpr,
):
    """Adds the values of the steps before those from `first_step` to `end_step`, and computes the weights of these.

    Without MASKED all rows see all keys of these steps. `done`: stages of earlier tiles.
    """
    for step in range(first_step, end_step):
        now = done + step
        stage = now % STAGES
        mbarrier.wait(full.index(stage), now // STAGES & 1)
        fence_async_shared()
        scores = _scores_of(q_shared, first_part, k_shared.index(stage), no_scores, BLOCK_D)
        acc = warpgroup_mma(p, v_shared.index(stage), acc, is_async=True)
        # Both products of the step before have been waited for.
        mbarrier.arrive(empty.index((now - 1) % STAGES), count=1)
        scores = warpgroup_mma_wait(1, [scores])
        weights, fade, highest, total = _softmax(
            scores, highest, total, position, last_key, slope, start + step * BLOCK_N, page_start, MASKED,
            SCORES, BLOCK_N, SCALE, SOFT_CAP, WINDOW, CHUNK,
        )  # fmt: skip
        p = gl.convert_layout(weights.to(p.dtype), gl.DotOperandLayout(0, VALUES, 2))
        total = _pinned(total)
        # With the weights, or the compiler would compute them after it has waited.
        acc, p = warpgroup_mma_wait(0, [acc, p])
        acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, VALUES))[:, None]
    return acc, p, highest, total


@gluon.jit
def _compute(  # type: ignore[no-untyped-def]
    HALF: gl.constexpr,
    num_turns,
    out_ptr,
    sinks_ptr,
    slopes_ptr,
    q_shared,
    k_shared,
    v_shared,
    q_full,
    q_empty,
    full,
    empty,
    notes,
    GROUP: gl.constexpr,
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
    Q_STAGES: gl.constexpr,
):
    """The warps that compute one half of a tile's rows."""
    WARPS: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = BLOCK_M // 2
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_D, 16])
    no_scores = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, SCORES)
    done = 0
    for turn in range(0, num_turns):
        mbarrier.wait(q_full.index(turn % Q_STAGES), turn // Q_STAGES & 1)
        first_note = turn % NOTE_STAGES * NOTES
        num_queries = _noted(notes, first_note + 1)
        start = _noted(notes, first_note + 7)
        page_start = _noted(notes, first_note + 6)
        full_step = _noted(notes, first_note + 9)
        edge_step = _noted(notes, first_note + 10)
        num_steps = _noted(notes, first_note + 11)
        query, _, head, exists = _rows(
            HALF * ROWS, _noted(notes, first_note + 2), num_queries, 0, _noted(notes, first_note + 4),
            _noted(notes, first_note + 3), gl.SliceLayout(1, SCORES), ROWS, BLOCK_H, BLOCK_Q, GROUP,
        )  # fmt: skip
        position = _noted(notes, first_note + 5) - num_queries + query
        # Padding has no keys, and a list of pages may be too short.
        last_key = gl.minimum(position, _noted(notes, first_note + 8) - 1)
        highest = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
        if sinks_ptr is not None:
            # A sink is a key whose value is zero: the sum of weights starts with it.
            highest = gl.load(sinks_ptr + head, mask=exists, other=0.0).to(gl.float32) * LOG2_E
            total = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, SCORES))
        slope = None
        if slopes_ptr is not None:
            slope = gl.load(slopes_ptr + head, mask=exists, other=0.0)
        acc = gl.full([ROWS, BLOCK_D], 0.0, gl.float32, VALUES)

        first_part = (turn % Q_STAGES * 2 + HALF) * (BLOCK_D // 64)
        mbarrier.wait(full.index(done % STAGES), done // STAGES & 1)
        fence_async_shared()
        scores = _scores_of(q_shared, first_part, k_shared.index(done % STAGES), no_scores, BLOCK_D)
        scores = warpgroup_mma_wait(0, [scores])
        weights, _, highest, total = _softmax(
            scores, highest, total, position, last_key, slope, start, page_start, True,
            SCORES, BLOCK_N, SCALE, SOFT_CAP, WINDOW, CHUNK,
        )  # fmt: skip
        p = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, VALUES, 2))

        if WINDOW > 0 or CHUNK > 0:
            acc, p, highest, total = _steps(
                1, gl.minimum(full_step, num_steps), acc, p, highest, total, done, position, last_key, slope,
                start, page_start, q_shared, first_part, k_shared, v_shared, full, empty, no_scores,
                True, BLOCK_N, BLOCK_D, STAGES, SCALE, SOFT_CAP, WINDOW, CHUNK, SCORES, VALUES,
            )  # fmt: skip
        acc, p, highest, total = _steps(
            gl.maximum(full_step, 1), edge_step, acc, p, highest, total, done, position, last_key, slope,
            start, page_start, q_shared, first_part, k_shared, v_shared, full, empty, no_scores,
            False, BLOCK_N, BLOCK_D, STAGES, SCALE, SOFT_CAP, WINDOW, CHUNK, SCORES, VALUES,
        )  # fmt: skip
        acc, p, highest, total = _steps(
            gl.maximum(edge_step, 1), num_steps, acc, p, highest, total, done, position, last_key, slope,
            start, page_start, q_shared, first_part, k_shared, v_shared, full, empty, no_scores,
            True, BLOCK_N, BLOCK_D, STAGES, SCALE, SOFT_CAP, WINDOW, CHUNK, SCORES, VALUES,
        )  # fmt: skip

        mbarrier.arrive(q_empty.index(turn % Q_STAGES), count=1)
        last = done + num_steps
        mbarrier.arrive(empty.index((last - 1) % STAGES), count=1)
        mbarrier.wait(full.index(last % STAGES), last // STAGES & 1)
        fence_async_shared()
        acc = warpgroup_mma(p, v_shared.index(last % STAGES), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(empty.index(last % STAGES), count=1)
        done = last + 1
        acc = acc / gl.convert_layout(gl.where(total == 0.0, 1.0, total), gl.SliceLayout(1, VALUES))[:, None]
        _, token, head, exists = _rows(
            HALF * ROWS, _noted(notes, first_note + 2), _noted(notes, first_note + 1), _noted(notes, first_note),
            _noted(notes, first_note + 4), _noted(notes, first_note + 3), gl.SliceLayout(1, VALUES),
            ROWS, BLOCK_H, BLOCK_Q, GROUP,
        )  # fmt: skip
        e = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, VALUES))
        offsets = (token * (KV_HEADS * GROUP) + head) * BLOCK_D
        gl.store(out_ptr + (offsets[:, None] + e[None, :]), acc.to(dtype), mask=exists[:, None])


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
    Q_STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
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
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M // 2, 64], dtype)
    kv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], dtype)
    # Each half of the rows, and 64 of their elements, is a tile by itself.
    q_shared = gl.allocate_shared_memory(dtype, [Q_STAGES * 2 * (BLOCK_D // 64), BLOCK_M // 2, 64], q_layout)
    k_shared = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], kv_layout)
    v_shared = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], kv_layout)
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    notes = gl.allocate_shared_memory(gl.int32, [NOTE_STAGES * NOTES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    for i in gl.static_range(STAGES):
        # All threads that copy tell that theirs have arrived.
        mbarrier.init(full.index(i), count=128)
        mbarrier.init(empty.index(i), count=2)

    num_tiles = 0
    for first in range(0, num_seqs + 1, SEQUENCES):
        num_tiles += gl.sum(_tiles_of(cu_seqlens_ptr, first, num_seqs, num_tokens, LEAST_QUERIES, BLOCK_Q), 0)
    if EARLY:
        _wait_for_previous(PDL)
    GROUPS: gl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    num_items = num_tiles * (KV_HEADS * GROUPS)
    program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    # In the last turn there may be nothing left for this one.
    num_turns = (num_items + num_programs - 1) // num_programs
    if _item_of(num_turns - 1, program, num_programs) >= num_items:
        num_turns -= 1
    gl.warp_specialize(
        [
            (_compute, (
                0, num_turns, out_ptr, sinks_ptr, slopes_ptr, q_shared, k_shared, v_shared, q_full, q_empty, full,
                empty, notes, GROUP, KV_HEADS, BLOCK_H, BLOCK_Q, BLOCK_M, BLOCK_N, BLOCK_D, SCALE, SOFT_CAP, WINDOW,
                CHUNK, STAGES, Q_STAGES,
            )),
            (_compute, (
                1, num_turns, out_ptr, sinks_ptr, slopes_ptr, q_shared, k_shared, v_shared, q_full, q_empty, full,
                empty, notes, GROUP, KV_HEADS, BLOCK_H, BLOCK_Q, BLOCK_M, BLOCK_N, BLOCK_D, SCALE, SOFT_CAP, WINDOW,
                CHUNK, STAGES, Q_STAGES,
            )),
            (_bring_all, (
                num_turns, num_tiles, q_ptr, k_ptr, v_ptr, cu_seqlens_ptr, kv_lens_ptr, page_indices_ptr,
                page_indptr_ptr, page_start_ptr, num_tokens, num_seqs, q_stride_t, q_stride_h, q_stride_d, k_stride_p,
                k_stride_s, k_stride_h, v_stride_p, v_stride_s, v_stride_h, q_shared, k_shared, v_shared, q_full,
                q_empty, full, empty, notes, LEAST_QUERIES, PAGE_SIZE, GROUP, KV_HEADS, BLOCK_H, BLOCK_Q, BLOCK_M,
                BLOCK_N, BLOCK_D, WINDOW, CHUNK, STAGES, Q_STAGES, PDL,
            )),
        ],
        [4, 4],
        [REGISTERS, 504 - 2 * REGISTERS],
    )  # fmt: skip
