"""The linear recurrence in Triton. Walks and launches: `precast.kernels.stateful.triton`."""

# To pyright, Triton's constants don't decide which branch is there.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.stateful.triton import clear_padding, load_ahead, tokens_of
from precast.kernels.triton_chain import wait_for_previous


@triton.jit
def _stepped(state, x, factor, IS_SUM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The next state [C], which is the token's result."""
    factor, x = factor.to(tl.float32), x.to(tl.float32)
    state *= factor
    return state + x if IS_SUM else tl.where(factor == 0, x, tl.maximum(state, x))


@triton.jit
def linear_recurrence_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    x_ptr,
    factor_ptr,
    state_ptr,
    slots_ptr,
    cu_seqlens_ptr,
    kv_lens_ptr,
    num_seqs,
    all_tokens,
    x_stride_t,
    x_stride_c,
    factor_stride_t,
    factor_stride_c,
    state_stride_p,
    state_stride_c,
    IS_SUM: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK channels of one sequence; sequence `num_seqs` is padding, whose results are zeros."""
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

    state = tl.zeros((BLOCK,), tl.float32)
    if state_ptr is not None:
        state_ptrs = state_ptr + slot * state_stride_p + channel * state_stride_c
        state = tl.load(state_ptrs, mask=mask & continues, other=0.0)
    x_ptrs = x_ptr + first * x_stride_t + channel * x_stride_c
    factor_ptrs = factor_ptr + first * factor_stride_t + channel * factor_stride_c
    out_ptrs = out_ptr + first * CHANNELS + channel
    out_type = out_ptr.dtype.element_ty
    token = first * 0
    in_groups = token + num_tokens // AHEAD * AHEAD
    x = load_ahead(x_ptrs, x_stride_t, token, mask & (token < in_groups), AHEAD)
    factor = load_ahead(factor_ptrs, factor_stride_t, token, mask & (token < in_groups), AHEAD)
    while token < in_groups:
        # The next group is on its way while this one is computed.
        following = token + AHEAD
        next_x = load_ahead(x_ptrs, x_stride_t, following, mask & (following < in_groups), AHEAD)
        next_factor = load_ahead(factor_ptrs, factor_stride_t, following, mask & (following < in_groups), AHEAD)
        for i in tl.static_range(AHEAD):
            state = _stepped(state, x[i], factor[i], IS_SUM)
            tl.store(out_ptrs + (token + i) * CHANNELS, state.to(out_type), mask=mask)
        x, factor = next_x, next_factor
        token = following
    while token < num_tokens:
        last_x = tl.load(x_ptrs + token * x_stride_t, mask=mask, other=0.0)
        last_factor = tl.load(factor_ptrs + token * factor_stride_t, mask=mask, other=0.0)
        state = _stepped(state, last_x, last_factor, IS_SUM)
        tl.store(out_ptrs + token * CHANNELS, state.to(out_type), mask=mask)
        token += 1

    if state_ptr is not None:
        tl.store(state_ptrs, state, mask=mask & (slot >= 0))
