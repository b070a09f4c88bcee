"""`precast.paged_block_sparse_attention` in Triton: each query over the blocks that are selected for it. Nothing is
read back to the host.

Heads that share both a key head and a selection are rows of one product. Several programs share what is selected for
them (`attend_kernel`), and `precast.kernels.sparse_attention.triton_attend:join_kernel` puts together what they found.

A cache of another type than the query's is converted to its type as it is loaded.
"""

# To pyright, Triton's constants don't decide which branch is there, and some functions never return.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.attention.triton_tiles import LOG2_E, weights_of
from precast.kernels.sparse_attention.triton_attend import sequence_of
from precast.kernels.triton_chain import wait_for_previous


@triton.jit
def _highest_before(blocks, entries):  # type: ignore[no-untyped-def]
    """The highest of the blocks of earlier entries, for each of these; -1 before the first."""
    return tl.max(tl.where(entries[None, :] < entries[:, None], blocks[None, :], -1), 1)


@triton.jit(do_not_specialize=["num_seqs", "num_parts"])
def attend_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    partial_ptr,
    weight_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    selected_ptr,
    k_scale_ptr,
    v_scale_ptr,
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
    k_stride_p,
    k_stride_s,
    k_stride_h,
    v_stride_p,
    v_stride_s,
    v_stride_h,
    selected_stride_t,
    selected_stride_g,
    selected_stride_m,
    COUNT: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    UNITS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token, one of UNITS units of its heads, and one of `num_parts` parts of the COUNT entries that are selected,
    and with a TAIL of its last block, as one entry more.

    With one part its program writes `y` [T, H, Dv]. Else each writes the sums of its weighted values, partial
    [T, H, parts, Dv], and the highest score and the total of its weights, weight [T, H, parts, 2]. A token of padding
    has no sequence, sees nothing, and gives zeros. A tile of BLOCK_N keys has a block or a part of one, or TOGETHER
    whole blocks.
    """
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1)
    part = tl.program_id(2)
    seq = sequence_of(cu_seqlens_ptr, token, num_seqs)
    is_real = seq < num_seqs
    first_page = tl.load(page_indptr_ptr + seq, mask=is_real, other=0)
    num_slots = (tl.load(page_indptr_ptr + seq + 1, mask=is_real, other=0) - first_page) * PAGE_SIZE
    page_start = tl.load(page_start_ptr + seq, mask=is_real, other=0)
    after = tl.load(cu_seqlens_ptr + seq + 1, mask=is_real, other=0) - token.to(tl.int32)
    # The position after the last key that the token sees.
    end = tl.load(kv_lens_ptr + seq, mask=is_real, other=0) - after + 1
    end = tl.where(is_real, tl.minimum(end, page_start + num_slots), 0)

    m = tl.arange(0, BLOCK_M)
    head = unit * (HEADS // UNITS) + m
    row_mask = m < HEADS // UNITS
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_V)
    q_offsets = (token * q_stride_t + head * q_stride_h)[:, None] + d[None, :] * q_stride_d
    q = tl.load(q_ptr + q_offsets, mask=row_mask[:, None] & (d < SIZE)[None, :], other=0.0)
    k_ptr += unit // (UNITS // KV_HEADS) * k_stride_h
    v_ptr += unit // (UNITS // KV_HEADS) * v_stride_h
    selected_ptr += token * selected_stride_t + unit // (UNITS // GROUPS) * selected_stride_g
    c = tl.arange(0, BLOCK_C)
    selected = tl.load(selected_ptr + c * selected_stride_m, mask=c < COUNT, other=-1)
    if TAIL:
        selected = tl.where(c == COUNT, end // BLOCK_SIZE, selected)
    factor = SCALE * LOG2_E
    if k_scale_ptr is not None:
        factor = factor * tl.load(k_scale_ptr)

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    split = tl.cdiv(COUNT + TAIL, num_parts)
    low = part * split
    # Entries after the last one that is a block are none of a part's work.
    is_block = (selected >= 0) & (selected <= (end - 1) // BLOCK_SIZE) & (end > page_start)
    high = tl.minimum(low + split, tl.max(tl.where(is_block, c + 1, 0), 0))
    lane = tl.arange(0, BLOCK_N)
    page_indices_ptr += first_page
    latest = tl.max(tl.where((c < low) & is_block, selected, -1), 0)
    steps: tl.constexpr = (BLOCK_SIZE + BLOCK_N - 1) // BLOCK_N
    for step in range(0, tl.cdiv(high - low, TOGETHER) * steps):
        if TOGETHER == 1:
            entry = low + step // steps
            block = tl.max(tl.where((c == entry) & is_block, selected, -1), 0)
            before = tl.max(tl.where((c < entry) & is_block, selected, -1), 0)
            place = step % steps * BLOCK_N + lane
        else:
            entry = low + step * TOGETHER + lane // BLOCK_SIZE
            block = tl.load(selected_ptr + entry * selected_stride_m, mask=entry < tl.minimum(high, COUNT), other=-1)
            if TAIL:
                block = tl.where((entry == COUNT) & (entry < high), end // BLOCK_SIZE, block)
            block = tl.where(block <= (end - 1) // BLOCK_SIZE, block, -1)
            before = tl.maximum(latest, _highest_before(block, entry))
            latest = tl.maximum(latest, tl.max(block, 0))
            place = lane % BLOCK_SIZE
        key = block * BLOCK_SIZE + place
        exists = (place < BLOCK_SIZE) & (key >= page_start) & (key < end) & (block > before)
        slot = tl.where(exists, key - page_start, 0)
        page = tl.load(page_indices_ptr + slot // PAGE_SIZE, mask=exists, other=0).to(tl.int64)
        k_slot = k_ptr + page * k_stride_p + slot % PAGE_SIZE * k_stride_s
        v_slot = v_ptr + page * v_stride_p + slot % PAGE_SIZE * v_stride_s
        k_offsets, v_offsets = d[None, :], e[None, :]
        k = tl.load(k_slot[:, None] + k_offsets, mask=exists[:, None] & (d < SIZE)[None, :], other=0.0)
        v = tl.load(v_slot[:, None] + v_offsets, mask=exists[:, None] & (e < VALUE_SIZE)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * factor
        scores = tl.where(exists[None, :], scores, float("-inf"))
        weights, fade, highest, total = weights_of(scores, highest, total)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * fade[:, None], input_precision=PRECISION)

    if v_scale_ptr is not None:
        acc = acc * tl.load(v_scale_ptr)
    row = token * HEADS + head
    mask = row_mask[:, None] & (e < VALUE_SIZE)[None, :]
    if num_parts == 1:
        y = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(y_ptr + row[:, None] * VALUE_SIZE + e[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        place = row * num_parts + part
        tl.store(partial_ptr + place[:, None] * VALUE_SIZE + e[None, :], acc, mask=mask)
        tl.store(weight_ptr + 2 * place, highest, mask=row_mask)
        tl.store(weight_ptr + 2 * place + 1, total, mask=row_mask)
