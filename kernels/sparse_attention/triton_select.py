"""`precast.paged_select_keys` in Triton: scores of keys, and the positions of the largest. Nothing is read back to the
host, and nothing is sorted. `precast.paged_select_entries` is the same with a key for each RATE tokens, so that keys
have numbers in the place of positions, and a query sees those whose tokens it all sees.

A score is kept as an integer of the same order. How the largest are found, `triton_search` says.

Sequences with one query share their keys among many programs: these make the scores, and the maxima of groups of them
(`score_kernel`); others note the few places that reach a bound (`note_kernel`); and one program selects among these
(`select_kernel`). Of other sequences a program computes some queries at a time, over all their keys, with memory of its
own for the scores (`select_kernel` too).
"""

# To pyright, Triton's constants don't decide which branch is there, and some functions never return.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.attention.triton_tiles import SEQUENCES
from precast.kernels.sparse_attention.triton_search import (
    LEAST,
    bound_of,
    note,
    write_all,
    write_in_passes,
    write_noted,
)
from precast.kernels.triton_chain import wait_for_previous


@triton.jit
def in_order(scores):  # type: ignore[no-untyped-def]
    """float32 as int32 of the same order: -0 as 0, NaN above all."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    return tl.where(scores != scores, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _tile_scores(  # type: ignore[no-untyped-def]
    q,
    weights,
    key,
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
    BLOCK_D: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The scores [N, BLOCK_Q] of the keys `key` [N] that are below `high`, for the heads `q` [BLOCK_Q * BLOCK_H, D] of
    BLOCK_Q queries."""
    d = tl.arange(0, BLOCK_D)
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
    return in_order(tl.sum(tl.reshape(products * weights[None, :], [key.shape[0], BLOCK_Q, BLOCK_H]), 2))


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
def _write_largest(  # type: ignore[no-untyped-def]
    out_ptr, scores_ptr, own_noted_ptr, num_keys, first_key,
    COUNT: tl.constexpr, GROUPS: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the numbers of the COUNT largest of scores, of which there are more, in ascending order. A program alone
    does it, with room to note ROOM places and scores."""
    bound = bound_of(scores_ptr, num_keys, COUNT, GROUPS)
    count = note(own_noted_ptr, own_noted_ptr + ROOM, scores_ptr, num_keys * 0, num_keys, bound, ROOM, BLOCK)
    # Other threads of the program read what these wrote, and no thread writes more before all have.
    tl.debug_barrier()
    if count <= ROOM:
        place = tl.arange(0, ROOM)
        write_noted(out_ptr, own_noted_ptr, own_noted_ptr + ROOM, place, place < count, first_key, COUNT)
    else:
        write_in_passes(out_ptr, scores_ptr, num_keys, bound, first_key, COUNT, BLOCK)
    tl.debug_barrier()


@triton.jit
def _part_of(num_keys, num_parts):  # type: ignore[no-untyped-def]
    """The keys of each part that `note_kernel` goes over, in whole vectors."""
    return tl.cdiv(tl.cdiv(num_keys, num_parts), 16) * 16


@triton.jit
def _write_of_parts(  # type: ignore[no-untyped-def]
    out_ptr, scores_ptr, keys_ptr, noted_ptr, counts_ptr, num_keys, num_parts, first_key,
    COUNT: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same by what `note_kernel` noted of each part."""
    split = _part_of(num_keys, num_parts)
    lane = tl.arange(0, ROOM)
    place = lane
    count = num_keys * 0
    for part in range(0, tl.cdiv(num_keys, split)):
        noted = tl.load(counts_ptr + 1 + part)
        count += noted
        # What is noted of the next part stands where that part begins.
        place += tl.where(lane >= count, split - noted, 0)
    if count <= ROOM:
        write_noted(out_ptr, keys_ptr, noted_ptr, place, lane < count, first_key, COUNT)
    else:
        write_in_passes(out_ptr, scores_ptr, num_keys, tl.load(counts_ptr), first_key, COUNT, BLOCK)


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


@triton.jit(do_not_specialize=["num_strands"])
def score_kernel(  # type: ignore[no-untyped-def]
    scores_ptr,
    maxima_ptr,
    q_ptr,
    weights_ptr,
    cache_ptr,
    cu_seqlens_ptr,
    kv_lens_ptr,
    page_indices_ptr,
    page_indptr_ptr,
    page_start_ptr,
    num_strands,
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
    """Scores of a sequence with one query, which sees more than COUNT keys, by programs that share its tiles of keys.

    `scores` and `maxima`, int32, have a place for each slot of all page lists. A strand is every `num_strands`-th tile,
    of one program; the maxima of its scores, BLOCK_N groups, stand where the scores of its first tile do.
    """
    wait_for_previous(PDL)
    first_token, num_queries, first_page, num_slots, kv_len, kept = _sequence(
        cu_seqlens_ptr, kv_lens_ptr, page_indptr_ptr, page_start_ptr, tl.program_id(0), PAGE_SIZE, RATE
    )
    num_keys = tl.minimum(kv_len // RATE - kept, num_slots)
    num_tiles = tl.cdiv(num_keys, BLOCK_N)
    tile = tl.program_id(1)
    if (num_queries != 1) | (num_keys <= COUNT) | (tile >= num_tiles):
        return
    q, weights = _heads(
        q_ptr, weights_ptr, first_token, 1, q_stride_t, q_stride_h, q_stride_d, weights_stride_t, weights_stride_h,
        HEADS, SIZE, 1, BLOCK_H, BLOCK_D,
    )  # fmt: skip
    scores_ptr += first_page.to(tl.int64) * PAGE_SIZE
    maxima_ptr += first_page.to(tl.int64) * PAGE_SIZE
    lane = tl.arange(0, BLOCK_N)
    strand = tile
    maxima = tl.full([BLOCK_N, 1], LEAST, tl.int32)
    for _ in range(tile, num_tiles, tl.num_programs(1)):
        key = tile * BLOCK_N + lane
        scores = _tile_scores(
            q, weights, key, num_keys, cache_ptr, page_indices_ptr + first_page, cache_stride_p, cache_stride_s,
            PAGE_SIZE, HEADS, SIZE, 1, BLOCK_H, BLOCK_D, SCALE, PRECISION,
        )  # fmt: skip
        exists = (key < num_keys)[:, None]
        tl.store(scores_ptr + key[:, None], scores, mask=exists)
        maxima = tl.maximum(maxima, tl.where(exists, scores, LEAST))
        group = strand * BLOCK_N + lane
        is_last = tile + num_strands >= num_tiles
        tl.store(maxima_ptr + group[:, None], maxima, mask=(is_last & (group < num_keys))[:, None])
        maxima = tl.where(is_last, LEAST, maxima)
        strand = tl.where(is_last, strand + tl.num_programs(1), strand)
        tile = tl.where(is_last, strand, tile + num_strands)


@triton.jit(do_not_specialize=["num_groups"])
def note_kernel(  # type: ignore[no-untyped-def]
    keys_ptr,
    noted_ptr,
    counts_ptr,
    scores_ptr,
    maxima_ptr,
    cu_seqlens_ptr,
    kv_lens_ptr,
    page_indptr_ptr,
    page_start_ptr,
    num_groups,
    COUNT: tl.constexpr,
    RATE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Notes the keys of one part of a sequence with one query whose scores reach its bound, and these scores.

    What is noted of a part, ascending, stands from the place of the part's first score on. `counts` [B, 1 + parts]: the
    bound, and how many were noted of each part. Every program finds the bound for itself, by the maxima of the
    `num_groups` groups at most: if one did, the others would only wait for it.
    """
    wait_for_previous(PDL)
    seq = tl.program_id(0)
    part = tl.program_id(1)
    num_parts = tl.num_programs(1)
    _, num_queries, first_page, num_slots, kv_len, kept = _sequence(
        cu_seqlens_ptr, kv_lens_ptr, page_indptr_ptr, page_start_ptr, seq, PAGE_SIZE, RATE
    )
    num_keys = tl.minimum(kv_len // RATE - kept, num_slots)
    split = _part_of(num_keys, num_parts)
    low = part * split
    if (num_queries != 1) | (num_keys <= COUNT) | (low >= num_keys):
        return
    place = first_page.to(tl.int64) * PAGE_SIZE
    bound = bound_of(maxima_ptr + place, tl.minimum(num_keys, num_groups), COUNT, GROUPS)
    count = note(
        keys_ptr + place + low, noted_ptr + place + low, scores_ptr + place, low, tl.minimum(low + split, num_keys),
        bound, split, BLOCK,
    )  # fmt: skip
    counts_ptr += seq * (1 + num_parts)
    tl.store(counts_ptr, bound, mask=part == 0)
    tl.store(counts_ptr + 1 + part, count)


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


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "own_places", "num_parts"])
def select_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    scores_ptr,
    keys_ptr,
    noted_ptr,
    counts_ptr,
    own_ptr,
    own_noted_ptr,
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
    num_parts,
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
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """The positions that each query selects, `out` [T, COUNT]: of sequences with one query by what was noted of their
    `num_parts` parts, of others by scores that are made here, and -1 for padding. The programs share these.

    `own` has room for `own_places` scores, at least for a tile of the longest sequence. As many programs as it has room
    for take tiles. `own_noted` has room for ROOM places and scores of each program.
    """
    wait_for_previous(PDL)
    program = tl.program_id(0)
    own_noted_ptr += program * 2 * ROOM
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
                _write_of_parts(
                    row_ptr, scores_ptr + place, keys_ptr + place, noted_ptr + place,
                    counts_ptr + seq * (1 + num_parts), num_keys, num_parts, kept, COUNT, ROOM, BLOCK,
                )  # fmt: skip
            else:
                write_all(row_ptr, num_keys, kept, COUNT, BLOCK)

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
            rows_ptr = own_ptr + tl.arange(0, BLOCK_Q) * stride
            for first in range(0, end, BLOCK_N):
                key = first + tl.arange(0, BLOCK_N)
                scores = _tile_scores(
                    q, weights, key, end, cache_ptr, page_indices_ptr + first_page, cache_stride_p, cache_stride_s,
                    PAGE_SIZE, HEADS, SIZE, BLOCK_Q, BLOCK_H, BLOCK_D, SCALE, PRECISION,
                )  # fmt: skip
                tl.store(rows_ptr[None, :] + key[:, None], scores, mask=(key < end)[:, None])
            # Other threads of the program read what these wrote.
            tl.debug_barrier()
        for query in range(0, own_queries):
            seen = tl.minimum((visible + query) // RATE - kept, num_slots)
            row_ptr = out_ptr + (first_token + first_query + query).to(tl.int64) * COUNT
            if seen > COUNT:
                _write_largest(row_ptr, own_ptr + query * stride, own_noted_ptr, seen, kept, COUNT, GROUPS, ROOM, BLOCK)
            else:
                write_all(row_ptr, seen, kept, COUNT, BLOCK)
        tl.debug_barrier()

    end = tl.load(cu_seqlens_ptr + num_seqs)
    for padding in range(program, num_tokens - end, num_programs):
        write_all(out_ptr + (end + padding).to(tl.int64) * COUNT, 0, 0, COUNT, BLOCK)
