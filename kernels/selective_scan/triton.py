"""The selective scan of Mamba 1 in Triton. Walks and launches: `precast.kernels.stateful.triton`."""

# To pyright, Triton's constants don't decide which branch is there.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.stateful.triton import clear_padding, load_ahead, tokens_of
from precast.kernels.triton_chain import wait_for_previous

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def softplus(x):  # type: ignore[no-untyped-def]
    """log(1 + exp(x)), also where exp(x) vanishes beside 1: what the sum rounded away is a factor of the result."""
    small = tl.exp(tl.minimum(x, 20.0))
    whole = 1.0 + small
    found = tl.where(whole == 1.0, small, tl.log(whole) * (small / tl.maximum(whole - 1.0, 1e-30)))
    return tl.where(x > 20.0, x, found)


@triton.jit
def _stepped(state, x, dt, b, c, rate, skip, bias, SOFTPLUS: tl.constexpr):  # type: ignore[no-untyped-def]
    """One token: its result [C] and the next state [C, N]. `rate` is to the base of 2."""
    x, step = x.to(tl.float32), dt.to(tl.float32) + bias
    if SOFTPLUS:
        step = softplus(step)
    added = (step * x)[:, None] * b.to(tl.float32)[None, :]
    state = tl.exp2(rate * step[:, None]) * state + added
    return tl.sum(state * c.to(tl.float32)[None, :], 1) + skip * x, state


@triton.jit
def selective_scan_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    dt_bias_ptr,
    state_ptr,
    slots_ptr,
    cu_seqlens_ptr,
    kv_lens_ptr,
    num_seqs,
    all_tokens,
    x_stride_t,
    x_stride_c,
    dt_stride_t,
    dt_stride_c,
    a_stride_c,
    a_stride_n,
    b_stride_t,
    b_stride_n,
    c_stride_t,
    c_stride_n,
    d_stride_c,
    dt_bias_stride_c,
    state_stride_p,
    state_stride_c,
    state_stride_n,
    SOFTPLUS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_C channels of one sequence; sequence `num_seqs` is padding, whose results are zeros."""
    wait_for_previous(PDL)
    seq = tl.program_id(1)
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    n = tl.arange(0, BLOCK_N)
    mask, n_mask = channel < CHANNELS, n < WIDTH
    if seq == num_seqs:
        clear_padding(out_ptr, CHANNELS, channel, mask, cu_seqlens_ptr, num_seqs, all_tokens, AHEAD)
        return
    first, num_tokens, slot, continues = tokens_of(cu_seqlens_ptr, slots_ptr, kv_lens_ptr, seq)
    if num_tokens <= 0:
        return

    rate_mask = mask[:, None] & n_mask[None, :]
    rate = tl.load(a_ptr + channel[:, None] * a_stride_c + n[None, :] * a_stride_n, mask=rate_mask, other=0.0)
    rate = rate.to(tl.float32) * LOG2_E
    skip = tl.zeros((BLOCK_C,), tl.float32)
    if d_ptr is not None:
        skip = tl.load(d_ptr + channel * d_stride_c, mask=mask, other=0.0).to(tl.float32)
    bias = tl.zeros((BLOCK_C,), tl.float32)
    if dt_bias_ptr is not None:
        bias = tl.load(dt_bias_ptr + channel * dt_bias_stride_c, mask=mask, other=0.0).to(tl.float32)
    state = tl.zeros((BLOCK_C, BLOCK_N), tl.float32)
    if state_ptr is not None:
        state_ptrs = state_ptr + slot * state_stride_p + channel[:, None] * state_stride_c + n[None, :] * state_stride_n
        state = tl.load(state_ptrs, mask=rate_mask & continues, other=0.0)

    x_ptrs = x_ptr + first * x_stride_t + channel * x_stride_c
    dt_ptrs = dt_ptr + first * dt_stride_t + channel * dt_stride_c
    b_ptrs = b_ptr + first * b_stride_t + n * b_stride_n
    c_ptrs = c_ptr + first * c_stride_t + n * c_stride_n
    out_ptrs = out_ptr + first * CHANNELS + channel
    out_type = out_ptr.dtype.element_ty
    token = first * 0
    in_groups = token + num_tokens // AHEAD * AHEAD
    is_there = token < in_groups
    x = load_ahead(x_ptrs, x_stride_t, token, mask & is_there, AHEAD)
    dt = load_ahead(dt_ptrs, dt_stride_t, token, mask & is_there, AHEAD)
    b = load_ahead(b_ptrs, b_stride_t, token, n_mask & is_there, AHEAD)
    c = load_ahead(c_ptrs, c_stride_t, token, n_mask & is_there, AHEAD)
    while token < in_groups:
        # The next group is on its way while this one is computed.
        following = token + AHEAD
        is_there = following < in_groups
        next_x = load_ahead(x_ptrs, x_stride_t, following, mask & is_there, AHEAD)
        next_dt = load_ahead(dt_ptrs, dt_stride_t, following, mask & is_there, AHEAD)
        next_b = load_ahead(b_ptrs, b_stride_t, following, n_mask & is_there, AHEAD)
        next_c = load_ahead(c_ptrs, c_stride_t, following, n_mask & is_there, AHEAD)
        for i in tl.static_range(AHEAD):
            y, state = _stepped(state, x[i], dt[i], b[i], c[i], rate, skip, bias, SOFTPLUS)
            tl.store(out_ptrs + (token + i) * CHANNELS, y.to(out_type), mask=mask)
        x, dt, b, c = next_x, next_dt, next_b, next_c
        token = following
    while token < num_tokens:
        last_x = tl.load(x_ptrs + token * x_stride_t, mask=mask, other=0.0)
        last_dt = tl.load(dt_ptrs + token * dt_stride_t, mask=mask, other=0.0)
        last_b = tl.load(b_ptrs + token * b_stride_t, mask=n_mask, other=0.0)
        last_c = tl.load(c_ptrs + token * c_stride_t, mask=n_mask, other=0.0)
        y, state = _stepped(state, last_x, last_dt, last_b, last_c, rate, skip, bias, SOFTPLUS)
        tl.store(out_ptrs + token * CHANNELS, y.to(out_type), mask=mask)
        token += 1

    if state_ptr is not None:
        tl.store(state_ptrs, state, mask=rate_mask & (slot >= 0))
