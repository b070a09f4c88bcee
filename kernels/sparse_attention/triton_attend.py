"""`precast.paged_sparse_latent_attention` in Triton: each query over the latents that are selected for it, in the space
of latents. Nothing is read back to the host.

Queries are multiplied by the key's part of the weight before, and results by the value's after, by
`precast.kernels.latent_attention.triton:head_product_kernel`; between, latents are keys and values of one head, and
heads are rows of one product. Several programs share what is selected for a query (`attend_kernel`), and `join_kernel`
puts together what they found.

A cache of another type than the query's is converted to its type as it is loaded.
"""

# To pyright, Triton's constants don't decide which branch is there, and some functions never return.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.attention.triton_tiles import LOG2_E, SEQUENCES, weights_of
from precast.kernels.triton_chain import wait_for_previous


@triton.jit
def sequence_of(cu_seqlens_ptr, token, num_seqs):  # type: ignore[no-untyped-def]
    """The number of a token's sequence; `num_seqs` for padding."""
    seq = 0
    for first in range(0, num_seqs, SEQUENCES):
        b = first + tl.arange(0, SEQUENCES)
        end = tl.load(cu_seqlens_ptr + b + 1, mask=b < num_seqs, other=0)
        seq += tl.sum(((b < num_seqs) & (end <= token)).to(tl.int32), 0)
    return seq


@triton.jit(do_not_specialize=["num_seqs", "num_parts"])
def attend_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    partial_ptr,
    weight_ptr,
    q_latent_ptr,
    q_ptr,
    cache_ptr,
    selected_ptr,
    sinks_ptr,
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
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token, BLOCK_M of its heads, and one of `num_parts` parts of the COUNT entries that are selected for it.

    With one part its program writes `y` [T, H, C]. Else each writes the sums of its weighted latents, partial
    [T, H, parts, C], and the highest score and the total of its weights, weight [T, H, parts, 2]. A token of padding
    has no sequence, sees nothing, and gives zeros.
    """
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(2)
    seq = sequence_of(cu_seqlens_ptr, token, num_seqs)
    is_real = seq < num_seqs
    first_page = tl.load(page_indptr_ptr + seq, mask=is_real, other=0)
    num_slots = (tl.load(page_indptr_ptr + seq + 1, mask=is_real, other=0) - first_page) * PAGE_SIZE
    page_start = tl.load(page_start_ptr + seq, mask=is_real, other=0)
    after = tl.load(cu_seqlens_ptr + seq + 1, mask=is_real, other=0) - token.to(tl.int32)
    # How many keys the token sees, counted from the first that is kept.
    visible = tl.load(kv_lens_ptr + seq, mask=is_real, other=0) - page_start - after + 1
    visible = tl.where(is_real, tl.minimum(visible, num_slots), 0)

    head = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = head < HEADS
    c = tl.arange(0, BLOCK_C)
    r = tl.arange(0, BLOCK_R)
    row = token * HEADS + head
    mask = row_mask[:, None] & (c < LATENT)[None, :]
    q = tl.load(q_latent_ptr + row[:, None] * LATENT + c[None, :], mask=mask, other=0.0)
    q_offsets = (token * q_stride_t + head * q_stride_h)[:, None] + (NOPE + r)[None, :] * q_stride_d
    q_rope = tl.load(q_ptr + q_offsets, mask=row_mask[:, None] & (r < ROPE)[None, :], other=0.0)

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        # A sink is a key whose value is zero: the first part's sum of weights starts with it.
        sink = tl.load(sinks_ptr + head, mask=row_mask, other=0.0).to(tl.float32) * LOG2_E
        highest = tl.where(part == 0, sink, highest)
        total = tl.where(part == 0, 1.0, total)
    acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    split = tl.cdiv(tl.cdiv(COUNT, num_parts), BLOCK_N) * BLOCK_N
    low = part * split
    high = tl.where(visible > 0, tl.minimum(low + split, COUNT), low)
    lane = tl.arange(0, BLOCK_N)
    selected_ptr += token * selected_stride_t
    for first in range(low, high, BLOCK_N):
        entry = first + lane
        key = tl.load(selected_ptr + entry * selected_stride_m, mask=entry < high, other=-1)
        exists = (entry < high) & (key >= page_start) & (key - page_start < visible)
        key = tl.where(exists, key - page_start, 0)
        page = tl.load(page_indices_ptr + first_page + key // PAGE_SIZE, mask=exists, other=0).to(tl.int64)
        slot_ptr = cache_ptr + page * cache_stride_p + key % PAGE_SIZE * cache_stride_s
        latent = tl.load(slot_ptr[:, None] + c[None, :], mask=exists[:, None] & (c < LATENT)[None, :], other=0.0)
        latent = latent.to(q.dtype)
        rope = tl.load(slot_ptr[:, None] + LATENT + r[None, :], mask=exists[:, None] & (r < ROPE)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(latent), input_precision=PRECISION)
        scores = tl.dot(q_rope, tl.trans(rope.to(q.dtype)), scores, input_precision=PRECISION) * (SCALE * LOG2_E)
        scores = tl.where(exists[None, :], scores, float("-inf"))
        weights, fade, highest, total = weights_of(scores, highest, total)
        acc = tl.dot(weights.to(q.dtype), latent, acc * fade[:, None], input_precision=PRECISION)
    if num_parts == 1:
        y = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(y_ptr + row[:, None] * LATENT + c[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        place = row * num_parts + part
        tl.store(partial_ptr + place[:, None] * LATENT + c[None, :], acc, mask=mask)
        tl.store(weight_ptr + 2 * place, highest, mask=row_mask)
        tl.store(weight_ptr + 2 * place + 1, total, mask=row_mask)


@triton.jit
def joined(  # type: ignore[no-untyped-def]
    partial_ptr, weight_ptr, row, num_parts, LATENT: tl.constexpr, BLOCK_C: tl.constexpr, PARTS: tl.constexpr
):
    """The parts of a row, joined: sum_s 2^(m_s - m) acc_s, with m = max_s m_s; m, and sum_s 2^(m_s - m) total_s, both
    [1]. PARTS are joined at a time, in order."""
    c = tl.arange(0, BLOCK_C)
    highest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_C], tl.float32)
    for first in range(0, num_parts, PARTS):
        part = first + tl.arange(0, PARTS)
        exists = part < num_parts
        place = row * num_parts + part
        scores = tl.load(weight_ptr + 2 * place, mask=exists, other=float("-inf"))
        totals = tl.load(weight_ptr + 2 * place + 1, mask=exists, other=0.0)
        mask = exists[:, None] & (c < LATENT)[None, :]
        values = tl.load(partial_ptr + place[:, None] * LATENT + c[None, :], mask=mask, other=0.0)
        new_highest = tl.maximum(highest, tl.max(scores, 0))
        # A row that sees no key of these parts, nor of those before.
        reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - reference)
        fade = tl.exp2(highest - reference)
        total = total * fade + tl.sum(totals * weights, 0)
        acc = acc * fade + tl.sum(values * weights[:, None], 0)
        highest = new_highest
    return acc, highest, total


@triton.jit(do_not_specialize=["num_parts"])
def join_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    partial_ptr,
    weight_ptr,
    num_parts,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """What the parts of a token found for a head, joined: y = sum_s 2^(m_s - m) acc_s / sum_s 2^(m_s - m) total_s."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    c = tl.arange(0, BLOCK_C)
    acc, _, total = joined(partial_ptr, weight_ptr, row, num_parts, LATENT, BLOCK_C, PARTS)
    y = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(y_ptr + row * LATENT + c, y.to(y_ptr.dtype.element_ty), mask=c < LATENT)
