"""The attention of RWKV in Triton. Walks and launches: `precast.kernels.stateful.triton`."""

# To pyright, Triton's constants don't decide which branch is there.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.stateful.triton import clear_padding, load_ahead, tokens_of
from precast.kernels.triton_chain import wait_for_previous


@triton.jit
def _stepped(values, weights, top, k, v, decay, bonus):  # type: ignore[no-untyped-def]
    """One token: its result, and the next sums, whose largest exponent is taken out."""
    k, v = k.to(tl.float32), v.to(tl.float32)
    highest = tl.maximum(top, k + bonus)
    old, new = tl.exp(top - highest), tl.exp(k + bonus - highest)
    y = (old * values + new * v) / (old * weights + new)
    highest = tl.maximum(top + decay, k)
    old, new = tl.exp(top + decay - highest), tl.exp(k - highest)
    return y, old * values + new * v, old * weights + new, highest


@triton.jit
def wkv_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    first_ptr,
    state_ptr,
    slots_ptr,
    cu_seqlens_ptr,
    kv_lens_ptr,
    num_seqs,
    all_tokens,
    k_stride_t,
    k_stride_c,
    v_stride_t,
    v_stride_c,
    decay_stride_c,
    first_stride_c,
    state_stride_p,
    state_stride_s,
    state_stride_c,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK channels of one sequence: the sums of `precast.kernels.wkv.step`.

    Sequence `num_seqs` is padding, whose results are zeros.
    """
    wait_for_previous(PDL)
    seq = tl.program_id(1)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < CHANNELS
    if seq == num_seqs:
        clear_padding(out_ptr, CHANNELS, channel, mask, cu_seqlens_ptr, num_seqs, all_tokens, AHEAD)
        return
    first, num_tokens, slot, continues = tokens_of(cu_seqlens_ptr, slots_ptr, kv_lens_ptr, seq)
    if num_tokens <= 0:
        return

    decay = tl.load(decay_ptr + channel * decay_stride_c, mask=mask, other=0.0).to(tl.float32)
    bonus = tl.load(first_ptr + channel * first_stride_c, mask=mask, other=0.0).to(tl.float32)
    values = tl.zeros((BLOCK,), tl.float32)
    weights = tl.zeros((BLOCK,), tl.float32)
    top = tl.zeros((BLOCK,), tl.float32)
    if state_ptr is not None:
        state_ptrs = state_ptr + slot * state_stride_p + channel * state_stride_c
        values = tl.load(state_ptrs, mask=mask & continues, other=0.0)
        weights = tl.load(state_ptrs + state_stride_s, mask=mask & continues, other=0.0)
        top = tl.load(state_ptrs + 2 * state_stride_s, mask=mask & continues, other=0.0)
    # Sums over nothing have no largest exponent.
    top = tl.where(weights == 0.0, float("-inf"), top)

    k_ptrs = k_ptr + first * k_stride_t + channel * k_stride_c
    v_ptrs = v_ptr + first * v_stride_t + channel * v_stride_c
    out_ptrs = out_ptr + first * CHANNELS + channel
    out_type = out_ptr.dtype.element_ty
    token = first * 0
    in_groups = token + num_tokens // AHEAD * AHEAD
    k = load_ahead(k_ptrs, k_stride_t, token, mask & (token < in_groups), AHEAD)
    v = load_ahead(v_ptrs, v_stride_t, token, mask & (token < in_groups), AHEAD)
    while token < in_groups:
        # The next group is on its way while this one is computed.
        following = token + AHEAD
        next_k = load_ahead(k_ptrs, k_stride_t, following, mask & (following < in_groups), AHEAD)
        next_v = load_ahead(v_ptrs, v_stride_t, following, mask & (following < in_groups), AHEAD)
        for i in tl.static_range(AHEAD):
            y, values, weights, top = _stepped(values, weights, top, k[i], v[i], decay, bonus)
            tl.store(out_ptrs + (token + i) * CHANNELS, y.to(out_type), mask=mask)
        k, v = next_k, next_v
        token = following
    while token < num_tokens:
        last_k = tl.load(k_ptrs + token * k_stride_t, mask=mask, other=0.0)
        last_v = tl.load(v_ptrs + token * v_stride_t, mask=mask, other=0.0)
        y, values, weights, top = _stepped(values, weights, top, last_k, last_v, decay, bonus)
        tl.store(out_ptrs + token * CHANNELS, y.to(out_type), mask=mask)
        token += 1

    if state_ptr is not None:
        kept = mask & (slot >= 0)
        tl.store(state_ptrs, values, mask=kept)
        tl.store(state_ptrs + state_stride_s, weights, mask=kept)
        tl.store(state_ptrs + 2 * state_stride_s, top, mask=kept)
