"""The attention of RWKV in Triton. Walks and launches: `precast.kernels.stateful.triton`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from precast.kernels.stateful.forms import forms
from precast.kernels.stateful.triton import tokens_of, zeros
from precast.kernels.stateful.walks import Slots

_BLOCK = 128
"""Channels of a program."""


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
    out_stride_t,
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
):
    """BLOCK channels of one sequence: the sums of `precast.kernels.wkv.step`, whose largest exponent is taken out."""
    found = tokens_of(cu_seqlens_ptr, slots_ptr, kv_lens_ptr, tl.program_id(1))
    first_token, num_tokens, slot, continues = found  # pyright: ignore[reportGeneralTypeIssues]
    if num_tokens <= 0:
        return

    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = c < CHANNELS
    decay = tl.load(decay_ptr + c * decay_stride_c, mask=mask, other=0.0).to(tl.float32)
    bonus = tl.load(first_ptr + c * first_stride_c, mask=mask, other=0.0).to(tl.float32)
    state_ptr += slot * state_stride_p + c * state_stride_c
    values = tl.load(state_ptr, mask=mask & continues, other=0.0)
    weights = tl.load(state_ptr + state_stride_s, mask=mask & continues, other=0.0)
    top = tl.load(state_ptr + 2 * state_stride_s, mask=mask & continues, other=0.0)
    top = tl.where(weights == 0.0, float("-inf"), top)

    for token in range(first_token, first_token + num_tokens):
        k = tl.load(k_ptr + token * k_stride_t + c * k_stride_c, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + token * v_stride_t + c * v_stride_c, mask=mask, other=0.0).to(tl.float32)
        highest = tl.maximum(top, k + bonus)
        old, new = tl.exp(top - highest), tl.exp(k + bonus - highest)
        y = (old * values + new * v) / (old * weights + new)
        tl.store(out_ptr + token * out_stride_t + c, y.to(out_ptr.dtype.element_ty), mask=mask)

        highest = tl.maximum(top + decay, k)
        old, new = tl.exp(top + decay - highest), tl.exp(k - highest)
        values, weights, top = old * values + new * v, old * weights + new, highest

    kept = mask & (slot >= 0)
    tl.store(state_ptr, values, mask=kept)
    tl.store(state_ptr + state_stride_s, weights, mask=kept)
    tl.store(state_ptr + 2 * state_stride_s, top, mask=kept)


def _scan(
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    first: torch.Tensor,
    held: Slots,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`precast.wkv`, see `precast.kernels.wkv.wkv`; into `out`, if given."""
    out = zeros(out, v, v.shape)
    count, channels = held.slots.shape[0], v.shape[2]
    if count == 0 or v.shape[1] == 0:
        return out
    launch: Any = wkv_kernel[triton.cdiv(channels, _BLOCK), count]
    # Triton launches on the current device, whatever device the tensors are on.
    with torch.cuda.device_of(v):
        launch(
            out,
            k,
            v,
            decay,
            first,
            *held,
            out.stride(1),
            *k.stride()[1:],
            *v.stride()[1:],
            *decay.stride(),
            *first.stride(),
            *held.state.stride(),
            CHANNELS=channels,
            BLOCK=_BLOCK,
            num_warps=1,
        )
    return out


wkv, stateful_wkv = forms("wkv", _scan)
