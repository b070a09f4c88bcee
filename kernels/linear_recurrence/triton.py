"""The linear recurrence in Triton. Walks and launches: `precast.kernels.stateful.triton`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from precast.kernels.linear_recurrence.linear_recurrence import joining
from precast.kernels.stateful.forms import forms
from precast.kernels.stateful.triton import tokens_of, zeros
from precast.kernels.stateful.walks import Slots

_BLOCK = 128
"""Channels of a program."""


@triton.jit
def linear_recurrence_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    x_ptr,
    factor_ptr,
    state_ptr,
    slots_ptr,
    cu_seqlens_ptr,
    kv_lens_ptr,
    out_stride_t,
    x_stride_t,
    x_stride_c,
    factor_stride_t,
    factor_stride_c,
    state_stride_p,
    state_stride_c,
    IS_SUM: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK channels of one sequence."""
    found = tokens_of(cu_seqlens_ptr, slots_ptr, kv_lens_ptr, tl.program_id(1))
    first, num_tokens, slot, continues = found  # pyright: ignore[reportGeneralTypeIssues]
    if num_tokens <= 0:
        return

    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = c < CHANNELS
    state_ptr += slot * state_stride_p + c * state_stride_c
    state = tl.load(state_ptr, mask=mask & continues, other=0.0)
    for token in range(first, first + num_tokens):
        x = tl.load(x_ptr + token * x_stride_t + c * x_stride_c, mask=mask, other=0.0).to(tl.float32)
        factor = tl.load(factor_ptr + token * factor_stride_t + c * factor_stride_c, mask=mask, other=0.0)
        state *= factor.to(tl.float32)
        state = state + x if IS_SUM else tl.maximum(state, x)
        tl.store(out_ptr + token * out_stride_t + c, state.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(state_ptr, state, mask=mask & (slot >= 0))


def _scan(
    x: torch.Tensor, factor: torch.Tensor, held: Slots, kind: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`precast.linear_recurrence`, see `precast.kernels.linear_recurrence.linear_recurrence`; into `out`, if given."""
    is_sum = joining(kind) is torch.add
    out = zeros(out, x, x.shape)
    count, channels = held.slots.shape[0], x.shape[2]
    if count == 0 or x.shape[1] == 0:
        return out
    launch: Any = linear_recurrence_kernel[triton.cdiv(channels, _BLOCK), count]
    # Triton launches on the current device, whatever device the tensors are on.
    with torch.cuda.device_of(x):
        launch(
            out,
            x,
            factor,
            *held,
            out.stride(1),
            *x.stride()[1:],
            *factor.stride()[1:],
            *held.state.stride(),
            IS_SUM=is_sum,
            CHANNELS=channels,
            BLOCK=_BLOCK,
            num_warps=1,
        )
    return out


linear_recurrence, stateful_linear_recurrence = forms("linear_recurrence", _scan)
