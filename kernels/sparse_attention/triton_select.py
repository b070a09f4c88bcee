"""`precast.paged_select_keys` in Triton: scores of keys, and the positions of the largest. Nothing is read back to the
host, and nothing is sorted. `precast.paged_select_entries` is the same with a key for each RATE tokens, so that keys
have numbers in the place of positions, and a query sees those whose tokens it all sees.

A score is kept as an integer of the same order. The places of few of a row's scores are noted, the largest among them
(`_note_high`). Which is the least that is selected is found bit by bit, and the positions of those above it are
written, and of as many of its equals as are wanted, the first ones.

Sequences with one query share their keys among several programs (`score_kernel`). Of other sequences a program computes
some queries at a time, over all their keys, with memory of its own for the scores (`select_kernel`).
"""

# To pyright, Triton's constants don't decide which branch is there, and some functions never return.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.attention.triton_tiles import SEQUENCES
from precast.kernels.triton_chain import wait_for_previous

_LEAST = tl.constexpr(-(1 << 31))


@triton.jit
def in_order(scores):  # type: ignore[no-untyped-def]
    """float32 as int32 of the same order: -0 as 0, NaN above all."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    return tl.where(scores != scores, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _score(  # type: ignore[no-untyped-def]
    scores_ptr,
    stride,
    q,
    weights,
    low,
    high,
    cache_ptr,
    page_indices_ptr,
    cache_stride_p,
    cache_stride_s,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Writes the scores of the keys from `low` to `high`, for the heads `q` [BLOCK_Q * BLOCK_H, D] of BLOCK_Q queries.

    Those of query i stand from `scores + i * stride` on, each at the place of its key.
    """
    d = tl.arange(0, BLOCK_D)
    lane = tl.arange(0, BLOCK_N)
    rows_ptr = scores_ptr + tl.arange(0, BLOCK_Q).to(tl.int64) * stride
    for first in range(low, high, BLOCK_N):
        key = first + lane
        exists = key < high
        page = tl.load(page_indices_ptr + key // PAGE_SIZE, mask=exists, other=0).to(tl.int64)
        slot_ptr = cache_ptr + page * cache_stride_p + key % PAGE_SIZE * cache_stride_s
        k = tl.load(slot_ptr[:, None] + d[None, :], mask=exists[:, None] & (d < SIZE)[None, :], other=0.0)
        # Heads are columns, so that their sum stays in the warp that has the key.
        products = tl.dot(k.to(q.dtype), tl.trans(q), input_precision=PRECISION) * SCALE
        products = tl.where(products < 0.0, 0.0, products)  # NaN stays NaN
        if HEADS < BLOCK_H:
            # Zeros in the place of a head, times an infinite key, would be NaN.
            products = tl.where((tl.arange(0, BLOCK_Q * BLOCK_H) % BLOCK_H < HEADS)[None, :], products, 0.0)
        sums = tl.sum(tl.reshape(products * weights[None, :], [BLOCK_N, BLOCK_Q, BLOCK_H]), 2)
        tl.store(rows_ptr[None, :] + key[:, None], in_order(sums), mask=exists[:, None])


@triton.jit
def _heads(  # type: ignore[no-untyped-def]
    q_ptr,
    weights_ptr,
    first_token,
    num_tokens,
    q_stride_t,
    q_stride_h,
    q_stride_d,
    weights_stride_t,
    weights_stride_h,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The heads of BLOCK_Q queries, of which `num_tokens` exist, and the weights of their scores; zeros for others."""
    row = tl.arange(0, BLOCK_Q * BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    head = row % BLOCK_H
    exists = (row // BLOCK_H < num_tokens) & (head < HEADS)
    token = (first_token + row // BLOCK_H).to(tl.int64)
    offsets = (token * q_stride_t + head * q_stride_h)[:, None] + d[None, :] * q_stride_d
    q = tl.load(q_ptr + offsets, mask=exists[:, None] & (d < SIZE)[None, :], other=0.0)
    weights = tl.load(weights_ptr + token * weights_stride_t + head * weights_stride_h, mask=exists, other=0.0)
    return q, weights


@triton.jit
def _reached_by(values, wanted):  # type: ignore[no-untyped-def]
    """The largest integer that at least `wanted` of the values reach, found two bits at a time; the least integer if
    fewer values than that are above it. There are less than 2^21 values."""
    found = wanted * 0
    for step in range(0, 16):
        # As if unsigned, the highest bit turned: the order of bits is that of numbers then.
        one = (wanted * 0 + 1) << (30 - 2 * step)
        first, second, third = found | one, found | (one << 1), found | one | (one << 1)
        # One sum counts for all three.
        reached = (values >= (first ^ _LEAST)).to(tl.int64)
        reached += (values >= (second ^ _LEAST)).to(tl.int64) << 21
        reached += (values >= (third ^ _LEAST)).to(tl.int64) << 42
        counts = tl.sum(reached, 0)
        found = tl.where((counts & 0x1FFFFF) >= wanted, first, found)
        found = tl.where(((counts >> 21) & 0x1FFFFF) >= wanted, second, found)
        found = tl.where((counts >> 42) >= wanted, third, found)
    return found ^ _LEAST


@triton.jit
def _least_in_passes(scores_ptr, num_keys, wanted, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The `wanted`-th largest score, and how many are larger, by a pass over all scores for each bit."""
    lane = tl.arange(0, BLOCK)
    found = wanted * 0
    above = wanted * 0
    for step in range(0, 33):
        # In the last pass those above what was found are counted.
        higher = tl.where(step < 32, found | ((wanted * 0 + 1) << (31 - step & 31)), found)
        reached = tl.zeros([BLOCK], tl.int32)
        for first in range(0, num_keys, BLOCK):
            scores = tl.load(scores_ptr + first + lane, mask=first + lane < num_keys, other=_LEAST)
            reached += ((scores > (higher ^ _LEAST)) | ((step < 32) & (scores == (higher ^ _LEAST)))).to(tl.int32)
        above = tl.sum(reached, 0)
        found = tl.where((step < 32) & (above >= wanted), higher, found)
    return found ^ _LEAST, above


@triton.jit
def _note_high(  # type: ignore[no-untyped-def]
    scores_ptr, kept_ptr, num_keys, wanted, COUNT: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr
):
    """Notes the places of scores that include the COUNT largest, in ascending order, in `kept`, which has room for
    GROUPS; how many there are.

    The COUNT-th largest of the maxima of GROUPS groups is reached by COUNT scores at least, and by few more where they
    lie as it falls out, since a group has every GROUPS-th score.
    """
    group = tl.arange(0, GROUPS)
    bound = num_keys * 0 + _LEAST
    if COUNT <= GROUPS:
        maxima = tl.full([GROUPS], _LEAST, tl.int32)
        for first in range(0, num_keys, GROUPS):
            maxima = tl.maximum(
                maxima, tl.load(scores_ptr + first + group, mask=first + group < num_keys, other=_LEAST)
            )
        bound = _reached_by(maxima, wanted)
    lane = tl.arange(0, BLOCK)
    count = num_keys * 0
    for first in range(0, num_keys, BLOCK):
        scores = tl.load(scores_ptr + first + lane, mask=first + lane < num_keys, other=_LEAST)
        is_kept = (scores >= bound) & (first + lane < num_keys)
        place = count + tl.cumsum(is_kept.to(tl.int32), 0) - 1
        tl.store(kept_ptr + place, first + lane, mask=is_kept & (place < GROUPS))
        count += tl.sum(is_kept.to(tl.int32), 0)
    return count


@triton.jit
def _write_largest(  # type: ignore[no-untyped-def]
    out_ptr, scores_ptr, kept_ptr, num_keys, first_key, COUNT: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes the numbers of the COUNT largest of scores, of which there are more, in ascending order."""
    wanted = num_keys * 0 + COUNT
    count = _note_high(scores_ptr, kept_ptr, num_keys, wanted, COUNT, GROUPS, BLOCK)
    # Other threads of the program read what these wrote, and no thread writes more before all have.
    tl.debug_barrier()
    if count <= GROUPS:
        group = tl.arange(0, GROUPS)
        key = tl.load(kept_ptr + group, mask=group < count, other=0)
        tl.debug_barrier()
        scores = tl.load(scores_ptr + key, mask=group < count, other=_LEAST)
        least = _reached_by(scores, wanted)
        is_equal = (group < count) & (scores == least)
        equals = COUNT - tl.sum((scores > least).to(tl.int32), 0)
        kept = (scores > least) | (is_equal & (tl.cumsum(is_equal.to(tl.int32), 0) <= equals))
        place = tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(out_ptr + place, first_key + key, mask=kept & (place < COUNT))
    else:
        least, above = _least_in_passes(scores_ptr, num_keys, wanted, BLOCK)
        lane = tl.arange(0, BLOCK)
        equals = COUNT - above
        written = 0
        for first in range(0, num_keys, BLOCK):
            exists = first + lane < num_keys
            scores = tl.load(scores_ptr + first + lane, mask=exists, other=0)
            is_equal = exists & (scores == least)
            rank = tl.cumsum(is_equal.to(tl.int32), 0)
            kept = (exists & (scores > least)) | (is_equal & (rank <= equals))
            place = written + tl.cumsum(kept.to(tl.int32), 0) - 1
            tl.store(out_ptr + place, first_key + first + lane, mask=kept & (place < COUNT))
            written += tl.sum(kept.to(tl.int32), 0)
            equals -= tl.sum(is_equal.to(tl.int32), 0)


@triton.jit
def _write_all(out_ptr, num_keys, first_key, COUNT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes the numbers of all keys, no more than COUNT, then -1."""
    for first in range(0, COUNT, BLOCK):
        place = first + tl.arange(0, BLOCK)
        tl.store(out_ptr + place, tl.where(place < num_keys, first_key + place, -1), mask=place < COUNT)


@triton.jit
def _sequence(  # type: ignore[no-untyped-def]
    cu_seqlens_ptr, kv_lens_ptr, page_indptr_ptr, page_start_ptr, seq, PAGE_SIZE: tl.constexpr, RATE: tl.constexpr
):
    """A sequence's first token, its queries, its place in the page lists and its slots there, its tokens, and the
    number of the first key that is kept."""
    first_token = tl.load(cu_seqlens_ptr + seq)
    num_queries = tl.load(cu_seqlens_ptr + seq + 1) - first_token
    first_page = tl.load(page_indptr_ptr + seq)
    num_slots = (tl.load(page_indptr_ptr + seq + 1) - first_page) * PAGE_SIZE
    kept = tl.load(page_start_ptr + seq) // RATE
    return first_token, num_queries, first_page, num_slots, tl.load(kv_lens_ptr + seq), kept


@triton.jit(do_not_specialize=["num_splits", "least_keys"])
def score_kernel(  # type: ignore[no-untyped-def]
    scores_ptr,
    q_ptr,
    weights_ptr,
    cache_ptr,
    cu_seqlens_ptr,
    kv_lens_ptr,
    page_indices_ptr,
    page_indptr_ptr,
    page_start_ptr,
    num_splits,
    least_keys,
    q_stride_t,
    q_stride_h,
    q_stride_d,
    weights_stride_t,
    weights_stride_h,
    cache_stride_p,
    cache_stride_s,
    COUNT: tl.constexpr,
    RATE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scores of a sequence with one query, which sees more than COUNT keys: one of `num_splits` parts of the keys.

    `scores`, int32, has a place for each slot of all page lists.
    """
    wait_for_previous(PDL)
    first_token, num_queries, first_page, num_slots, kv_len, kept = _sequence(
        cu_seqlens_ptr, kv_lens_ptr, page_indptr_ptr, page_start_ptr, tl.program_id(0), PAGE_SIZE, RATE
    )
    num_keys = tl.minimum(kv_len // RATE - kept, num_slots)
    split = tl.cdiv(tl.maximum(tl.cdiv(num_keys, num_splits), least_keys), BLOCK_N) * BLOCK_N
    low = tl.program_id(1) * split
    if (num_queries != 1) | (num_keys <= COUNT) | (low >= num_keys):
        return
    q, weights = _heads(
        q_ptr, weights_ptr, first_token, 1, q_stride_t, q_stride_h, q_stride_d, weights_stride_t, weights_stride_h,
        HEADS, SIZE, 1, BLOCK_H, BLOCK_D,
    )  # fmt: skip
    _score(
        scores_ptr + first_page.to(tl.int64) * PAGE_SIZE, 0, q, weights, low, tl.minimum(low + split, num_keys),
        cache_ptr, page_indices_ptr + first_page, cache_stride_p, cache_stride_s,
        PAGE_SIZE, HEADS, SIZE, 1, BLOCK_H, BLOCK_N, BLOCK_D, SCALE, PRECISION,
    )  # fmt: skip


@triton.jit
def _tiles_of(  # type: ignore[no-untyped-def]
    cu_seqlens_ptr, page_indptr_ptr, first, num_seqs, PAGE_SIZE: tl.constexpr, BLOCK_Q: tl.constexpr
):
    """Of the SEQUENCES from `first` on, the tiles of BLOCK_Q queries that each has, none with one query, and the most
    slots that one with tiles has."""
    b = first + tl.arange(0, SEQUENCES)
    is_real = b < num_seqs
    queries = tl.load(cu_seqlens_ptr + b + 1, mask=is_real, other=0) - tl.load(
        cu_seqlens_ptr + b, mask=is_real, other=0
    )
    end = tl.load(page_indptr_ptr + b + 1, mask=is_real, other=0)
    slots = (end - tl.load(page_indptr_ptr + b, mask=is_real, other=0)) * PAGE_SIZE
    has_tiles = is_real & (queries > 1)
    return tl.where(has_tiles, tl.cdiv(queries, BLOCK_Q), 0), tl.max(tl.where(has_tiles, slots, 0), 0)


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "own_places"])
def select_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    scores_ptr,
    own_ptr,
    kept_ptr,
    q_ptr,
    weights_ptr,
    cache_ptr,
    cu_seqlens_ptr,
    kv_lens_ptr,
    page_indices_ptr,
    page_indptr_ptr,
    page_start_ptr,
    num_tokens,
    num_seqs,
    own_places,
    q_stride_t,
    q_stride_h,
    q_stride_d,
    weights_stride_t,
    weights_stride_h,
    cache_stride_p,
    cache_stride_s,
    COUNT: tl.constexpr,
    RATE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """The positions that each query selects, `out` [T, COUNT]: of sequences with one query by the `scores` that there
    are, of others by scores that are made here, and -1 for padding. The programs share these.

    `own` has room for `own_places` scores, at least for a tile of the longest sequence. As many programs as it has room
    for take tiles. `kept` has room for GROUPS scores of each program.
    """
    wait_for_previous(PDL)
    program = tl.program_id(0)
    kept_ptr += program * GROUPS
    num_programs = tl.num_programs(0)
    for seq in range(program, num_seqs, num_programs):
        first_token, num_queries, first_page, num_slots, kv_len, kept = _sequence(
            cu_seqlens_ptr, kv_lens_ptr, page_indptr_ptr, page_start_ptr, seq, PAGE_SIZE, RATE
        )
        num_keys = tl.minimum(kv_len // RATE - kept, num_slots)
        row_ptr = out_ptr + first_token.to(tl.int64) * COUNT
        if num_queries == 1:
            if num_keys > COUNT:
                place = first_page.to(tl.int64) * PAGE_SIZE
                _write_largest(row_ptr, scores_ptr + place, kept_ptr, num_keys, kept, COUNT, GROUPS, BLOCK)
            else:
                _write_all(row_ptr, num_keys, kept, COUNT, BLOCK)

    num_tiles = 0
    longest = 0
    for first in range(0, num_seqs, SEQUENCES):
        tiles, slots = _tiles_of(cu_seqlens_ptr, page_indptr_ptr, first, num_seqs, PAGE_SIZE, BLOCK_Q)
        num_tiles += tl.sum(tiles, 0)
        longest = tl.maximum(longest, slots)
    stride = longest + tl.zeros([], tl.int64)
    active = tl.minimum(own_places // tl.maximum(stride * BLOCK_Q, 1), num_programs).to(tl.int32)
    own_ptr += program * stride * BLOCK_Q
    for tile in range(program, tl.where(program < active, num_tiles, 0), tl.maximum(active, 1)):
        seq = 0
        begin = 0
        before = 0
        for first in range(0, num_seqs, SEQUENCES):
            tiles, _ = _tiles_of(cu_seqlens_ptr, page_indptr_ptr, first, num_seqs, PAGE_SIZE, BLOCK_Q)
            ends = before + tl.cumsum(tiles, 0)
            seq += tl.sum((ends <= tile).to(tl.int32), 0)
            begin = tl.maximum(begin, tl.max(tl.where(ends <= tile, ends, 0), 0))
            before += tl.sum(tiles, 0)
        first_token, num_queries, first_page, num_slots, kv_len, kept = _sequence(
            cu_seqlens_ptr, kv_lens_ptr, page_indptr_ptr, page_start_ptr, seq, PAGE_SIZE, RATE
        )
        first_query = (tile - begin) * BLOCK_Q
        own_queries = tl.minimum(num_queries - first_query, BLOCK_Q)
        # The tokens that the first query sees; each one after it sees one more.
        visible = kv_len - num_queries + first_query + 1
        end = tl.minimum((visible + own_queries - 1) // RATE - kept, num_slots)
        if end > COUNT:
            q, weights = _heads(
                q_ptr, weights_ptr, first_token + first_query, own_queries, q_stride_t, q_stride_h, q_stride_d,
                weights_stride_t, weights_stride_h, HEADS, SIZE, BLOCK_Q, BLOCK_H, BLOCK_D,
            )  # fmt: skip
            _score(
                own_ptr, stride, q, weights, 0, end, cache_ptr, page_indices_ptr + first_page,
                cache_stride_p, cache_stride_s,
                PAGE_SIZE, HEADS, SIZE, BLOCK_Q, BLOCK_H, BLOCK_N, BLOCK_D, SCALE, PRECISION,
            )  # fmt: skip
            # Other threads of the program read what these wrote.
            tl.debug_barrier()
        for query in range(0, own_queries):
            seen = tl.minimum((visible + query) // RATE - kept, num_slots)
            row_ptr = out_ptr + (first_token + first_query + query).to(tl.int64) * COUNT
            if seen > COUNT:
                _write_largest(row_ptr, own_ptr + query * stride, kept_ptr, seen, kept, COUNT, GROUPS, BLOCK)
            else:
                _write_all(row_ptr, seen, kept, COUNT, BLOCK)
        tl.debug_barrier()

    end = tl.load(cu_seqlens_ptr + num_seqs)
    for padding in range(program, num_tokens - end, num_programs):
        _write_all(out_ptr + (end + padding).to(tl.int64) * COUNT, 0, 0, COUNT, BLOCK)
