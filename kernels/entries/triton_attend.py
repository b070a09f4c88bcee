"""`precast.paged_entry_attention` in Triton: each query over the entries that it sees, or over those of them that are
selected for it. Nothing is read back to the host.

Heads share the entries, and are rows of one product. Several programs share the entries of a query (`attend_kernel`),
and `join_kernel` puts together what they found.

A cache of another type than the query's is converted to its type as it is loaded.
"""

# To pyright, Triton's constants don't decide which branch is there, and some functions never return.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.attention.triton_tiles import LOG2_E, weights_of
from precast.kernels.sparse_attention.triton_attend import joined, sequence_of
from precast.kernels.triton_chain import wait_for_previous

_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _store_result(y_ptr, lse_ptr, row, acc, highest, total, c, mask, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """`y` and `lse` of rows [M], of which `mask` exist; zeros and -inf for a row that has seen nothing."""
    has_none = total == 0.0
    y = acc / tl.where(has_none, 1.0, total)[:, None]
    lse = tl.where(has_none, float("-inf"), (highest + tl.log2(tl.where(has_none, 1.0, total))) * _LN_2)
    tl.store(y_ptr + row[:, None] * SIZE + c[None, :], y, mask=mask[:, None] & (c < SIZE)[None, :])
    tl.store(lse_ptr + row, lse, mask=mask)


@triton.jit(do_not_specialize=["num_seqs", "num_parts"])
def attend_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    lse_ptr,
    partial_ptr,
    weight_ptr,
    q_ptr,
    cache_ptr,
    selected_ptr,
    cu_seqlens_ptr,
    kv_lens_ptr,
    page_indices_ptr,
    page_indptr_ptr,
    page_start_ptr,
    num_seqs,
    num_parts,
    q_stride_t,
    q_stride_h,
    q_stride_d,
    cache_stride_p,
    cache_stride_s,
    selected_stride_t,
    selected_stride_m,
    COUNT: tl.constexpr,
    RATE: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token, BLOCK_M of its heads, and one of `num_parts` parts of its entries: of the COUNT that `selected` names,
    or without that of the last WINDOW that it sees, or of all (0). A page has PAGE_SIZE entries, of RATE tokens each.

    With one part its program writes `y` [T, H, D] and `lse` [T, H]. Else each writes the sums of its weighted entries,
    partial [T, H, parts, D], and the highest score and the total of its weights, weight [T, H, parts, 2]. A token of
    padding has no sequence, and sees nothing.
    """
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(2)
    seq = sequence_of(cu_seqlens_ptr, token, num_seqs)
    is_real = seq < num_seqs
    first_page = tl.load(page_indptr_ptr + seq, mask=is_real, other=0)
    num_slots = (tl.load(page_indptr_ptr + seq + 1, mask=is_real, other=0) - first_page) * PAGE_SIZE
    # The number of the first entry that is kept.
    kept = tl.load(page_start_ptr + seq, mask=is_real, other=0) // RATE
    after = tl.load(cu_seqlens_ptr + seq + 1, mask=is_real, other=0) - token.to(tl.int32)
    # How many entries the token sees, counted from that one; and how many of these are there.
    seen = (tl.load(kv_lens_ptr + seq, mask=is_real, other=0) - after + 1) // RATE - kept
    end = tl.where(is_real, tl.minimum(seen, num_slots), 0)

    head = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = head < HEADS
    d = tl.arange(0, BLOCK_D)
    q_offsets = (token * q_stride_t + head * q_stride_h)[:, None] + d[None, :] * q_stride_d
    q = tl.load(q_ptr + q_offsets, mask=row_mask[:, None] & (d < SIZE)[None, :], other=0.0)

    begin = 0
    if selected_ptr is not None:
        selected_ptr += token * selected_stride_t
        last = tl.where(end > 0, COUNT, 0)
    else:
        if WINDOW > 0:
            begin = tl.maximum(seen - WINDOW, 0)
        last = end
    split = tl.cdiv(tl.cdiv(tl.maximum(last - begin, 0), num_parts), BLOCK_N) * BLOCK_N
    low = begin + part * split
    high = tl.minimum(low + split, last)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    lane = tl.arange(0, BLOCK_N)
    page_indices_ptr += first_page
    for first in range(low, high, BLOCK_N):
        place = first + lane
        exists = place < high
        if selected_ptr is not None:
            number = tl.load(selected_ptr + place * selected_stride_m, mask=exists, other=-1)
            exists = exists & (number >= kept)
            entry = tl.where(exists, number - kept, 0)
            exists = exists & (entry < end)
            entry = tl.where(exists, entry, 0)
        else:
            entry = tl.where(exists, place, 0)
        page = tl.load(page_indices_ptr + entry // PAGE_SIZE, mask=exists, other=0).to(tl.int64)
        entry_ptr = cache_ptr + page * cache_stride_p + entry % PAGE_SIZE * cache_stride_s
        # Slots without an entry hold anything, NaN too; a weight of zero would not keep that out of a product.
        k = tl.load(entry_ptr[:, None] + d[None, :], mask=exists[:, None] & (d < SIZE)[None, :], other=0.0)
        k = k.to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (SCALE * LOG2_E)
        scores = tl.where(exists[None, :], scores, float("-inf"))
        weights, fade, highest, total = weights_of(scores, highest, total)
        acc = tl.dot(weights.to(q.dtype), k, acc * fade[:, None], input_precision=PRECISION)
    row = token * HEADS + head
    if num_parts == 1:
        _store_result(y_ptr, lse_ptr, row, acc, highest, total, d, row_mask, SIZE)
    else:
        place = row * num_parts + part
        mask = row_mask[:, None] & (d < SIZE)[None, :]
        tl.store(partial_ptr + place[:, None] * SIZE + d[None, :], acc, mask=mask)
        tl.store(weight_ptr + 2 * place, highest, mask=row_mask)
        tl.store(weight_ptr + 2 * place + 1, total, mask=row_mask)


@triton.jit(do_not_specialize=["num_parts"])
def join_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    lse_ptr,
    partial_ptr,
    weight_ptr,
    num_parts,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """What the parts of a token found for a head, joined. PARTS are joined at a time, in order."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    acc, highest, total = joined(partial_ptr, weight_ptr, row, num_parts, SIZE, BLOCK_D, PARTS)
    rows = row + tl.zeros([1], tl.int64)
    _store_result(y_ptr, lse_ptr, rows, acc[None, :], highest, total, tl.arange(0, BLOCK_D), rows >= 0, SIZE)
