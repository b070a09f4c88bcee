"""Causal convolutions in Triton over packed sequences, with the update of their states: one launch.

The first tokens of a sequence, which see what its slot holds, are computed by a program that also writes the slot; no
other program touches it. All other tokens see tokens of this step alone, whatever sequence they are of.
"""

# To pyright a kernel that is called by another returns nothing.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.stateful.triton import tokens_of
from precast.kernels.triton_chain import wait_for_previous

# Sequences whose bounds are compared with tokens together.
_TOGETHER = tl.constexpr(64)


@triton.jit
def _activated(y, SILU: tl.constexpr):  # type: ignore[no-untyped-def]
    return y / (1.0 + tl.exp(-y)) if SILU else y


@triton.jit(do_not_specialize=["num_sequences", "num_tokens"])
def causal_conv_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    slots_ptr,
    cu_seqlens_ptr,
    kv_lens_ptr,
    num_sequences,
    num_tokens,
    x_stride_t,
    x_stride_c,
    weight_stride_c,
    weight_stride_k,
    bias_stride,
    state_stride_p,
    state_stride_c,
    state_stride_k,
    CHANNELS: tl.constexpr,
    BEFORE: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_C channels of the first BEFORE tokens of a sequence, or of those of BLOCK_T tokens that are none of these.

    A token sees the BEFORE tokens before it. The first `num_sequences` programs are those of sequences, the others also
    write zeros after the last sequence. `bias_ptr`, and `state_ptr` with `slots_ptr` and `kv_lens_ptr` may be None.
    """
    wait_for_previous(PDL)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    c_mask = c < CHANNELS
    weight_ptr += c * weight_stride_c
    bias = tl.zeros((BLOCK_C,), tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + c * bias_stride, mask=c_mask, other=0.0).to(tl.float32)
    sequence = tl.program_id(1)
    if sequence < num_sequences:
        first, count, slot, continues = tokens_of(cu_seqlens_ptr, slots_ptr, kv_lens_ptr, sequence)
        if count <= 0:
            return
        own_ptr = x_ptr + first * x_stride_t + c * x_stride_c
        target_ptr = y_ptr + first * CHANNELS + c
        if state_ptr is not None:
            held_ptr = state_ptr + slot * state_stride_p + c * state_stride_c
        for t in range(0, tl.minimum(count, BEFORE)):
            y = bias
            for k in tl.static_range(0, BEFORE + 1):
                source = t + k - BEFORE
                x = tl.load(own_ptr + source * x_stride_t, mask=c_mask & (source >= 0), other=0.0).to(tl.float32)
                if state_ptr is not None:
                    held = held_ptr + (BEFORE + source) * state_stride_k
                    old = tl.load(held, mask=c_mask & continues & (source < 0), other=0.0).to(tl.float32)
                    x = tl.where(source < 0, old, x)
                y += tl.load(weight_ptr + k * weight_stride_k, mask=c_mask, other=0.0).to(tl.float32) * x
            tl.store(target_ptr + t * CHANNELS, _activated(y, SILU).to(y_ptr.dtype.element_ty), mask=c_mask)
        if state_ptr is not None:
            j = tl.arange(0, BLOCK_K)[None, :]
            source = count + j - BEFORE
            is_kept = c_mask[:, None] & (j < BEFORE)
            new = tl.load(own_ptr[:, None] + source * x_stride_t, mask=is_kept & (source >= 0), other=0.0)
            old_ptr = held_ptr[:, None] + (BEFORE + source) * state_stride_k
            old = tl.load(old_ptr, mask=is_kept & continues & (source < 0), other=0.0)
            # All threads have read what is written now.
            tl.debug_barrier()
            kept = tl.where(source < 0, old, new)
            tl.store(held_ptr[:, None] + j * state_stride_k, kept, mask=is_kept & (slot >= 0))
        return

    t = (sequence - num_sequences) * BLOCK_T + tl.arange(0, BLOCK_T)
    # Where the sequence of each token begins, and where the last one ends.
    begin = tl.zeros((BLOCK_T,), tl.int32)
    for start in range(0, num_sequences + 1, _TOGETHER):
        each = start + tl.arange(0, _TOGETHER)
        bound = tl.load(cu_seqlens_ptr + each, mask=each <= num_sequences, other=0)
        begin = tl.maximum(begin, tl.max(tl.where(bound[None, :] <= t[:, None], bound[None, :], 0), 1))
    end = tl.load(cu_seqlens_ptr + num_sequences)
    is_later = (t - begin >= BEFORE) & (t < end)
    source_ptr = x_ptr + t[:, None].to(tl.int64) * x_stride_t + c[None, :] * x_stride_c
    y = tl.zeros((BLOCK_T, BLOCK_C), tl.float32) + bias[None, :]
    for k in tl.static_range(0, BEFORE + 1):
        x = tl.load(source_ptr + (k - BEFORE) * x_stride_t, mask=is_later[:, None] & c_mask[None, :], other=0.0)
        y += tl.load(weight_ptr + k * weight_stride_k, mask=c_mask, other=0.0).to(tl.float32)[None, :] * x.to(
            tl.float32
        )
    y = tl.where((t < end)[:, None], _activated(y, SILU), 0.0)
    is_own = is_later | ((t >= end) & (t < num_tokens))
    target = y_ptr + t[:, None].to(tl.int64) * CHANNELS + c[None, :]
    tl.store(target, y.to(y_ptr.dtype.element_ty), mask=is_own[:, None] & c_mask[None, :])
