"""What is linear attention with another decay or value, in Triton: selective scans and the delta rule. Walks and
launches: `precast.kernels.stateful.triton`.

For each head, with the query, key and value of a token and the state S [D, E]:

    S = exp(decay) * S        S += k (beta * (v - k S))^T, or k v^T without a beta        y = scale * q S + skip * v

With `steps`, the decay is the same for all tokens and is multiplied by the token's step, and so is the value.

A program has all rows of the state and some of its columns, which don't depend on each other. One warp does for most
sizes, so that sums over rows stay within it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from precast.kernels.blocks import power_of_two
from precast.kernels.stateful.triton import tokens_of
from precast.kernels.stateful.walks import Slots


@triton.jit
def scan_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    steps_ptr,
    beta_ptr,
    skip_ptr,
    state_ptr,
    slots_ptr,
    cu_seqlens_ptr,
    kv_lens_ptr,
    scale,
    epsilon,
    out_stride_t,
    out_stride_h,
    out_stride_e,
    q_stride_t,
    q_stride_h,
    q_stride_d,
    k_stride_t,
    k_stride_h,
    k_stride_d,
    v_stride_t,
    v_stride_h,
    v_stride_e,
    decay_stride_t,
    decay_stride_h,
    decay_stride_d,
    decay_stride_e,
    steps_stride_t,
    steps_stride_h,
    steps_stride_e,
    beta_stride_t,
    beta_stride_h,
    skip_stride_h,
    skip_stride_e,
    state_stride_p,
    state_stride_h,
    state_stride_d,
    state_stride_e,
    HAS_DECAY: tl.constexpr,
    HAS_STEPS: tl.constexpr,
    HAS_BETA: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    NORMALISES: tl.constexpr,
    BY_ROW: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """BLOCK_E columns of one head's state, for one sequence.

    A decay has a number for each row of the state if it is BY_ROW. Decays, steps and skips have one for each column if
    they are BY_COLUMN, else one for the head.
    """
    head = tl.program_id(1)
    found = tokens_of(cu_seqlens_ptr, slots_ptr, kv_lens_ptr, tl.program_id(2))
    first, num_tokens, slot, continues = found  # pyright: ignore[reportGeneralTypeIssues]
    if num_tokens <= 0:
        return

    d = tl.arange(0, BLOCK_D)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    row = d if BY_ROW else tl.arange(0, 1)
    column = e if BY_COLUMN else tl.arange(0, 1)
    d_mask, e_mask = d < SIZE, e < VALUE_SIZE
    row_mask, column_mask = row < SIZE, column < VALUE_SIZE
    decay_mask = row_mask[:, None] & column_mask[None, :]

    state_ptr += slot * state_stride_p + head * state_stride_h
    state_offsets = d[:, None] * state_stride_d + e[None, :] * state_stride_e
    state_mask = d_mask[:, None] & e_mask[None, :]
    state = tl.load(state_ptr + state_offsets, mask=state_mask & continues, other=0.0)

    q_ptr += head // GROUP * q_stride_h
    k_ptr += head // GROUP * k_stride_h
    v_ptr += head * v_stride_h
    decay_ptr += head * decay_stride_h
    decay_offsets = row[:, None] * decay_stride_d + column[None, :] * decay_stride_e
    if HAS_STEPS:
        rate = tl.load(decay_ptr + decay_offsets, mask=decay_mask, other=0.0).to(tl.float32)
    if HAS_SKIP:
        skip_offsets = head * skip_stride_h + column * skip_stride_e
        skip = tl.load(skip_ptr + skip_offsets, mask=column_mask, other=0.0).to(tl.float32)

    for token in range(first, first + num_tokens):
        q = tl.load(q_ptr + token * q_stride_t + d * q_stride_d, mask=d_mask, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + token * k_stride_t + d * k_stride_d, mask=d_mask, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + token * v_stride_t + e * v_stride_e, mask=e_mask, other=0.0).to(tl.float32)
        if NORMALISES:
            q *= tl.rsqrt(tl.sum(q * q) + epsilon)
            k *= tl.rsqrt(tl.sum(k * k) + epsilon)
        written = v
        if HAS_STEPS:
            steps_offsets = token * steps_stride_t + head * steps_stride_h + column * steps_stride_e
            step = tl.load(steps_ptr + steps_offsets, mask=column_mask, other=0.0).to(tl.float32)
            state *= tl.exp(rate * step[None, :])
            written *= step
        elif HAS_DECAY:
            decay = tl.load(decay_ptr + token * decay_stride_t + decay_offsets, mask=decay_mask, other=0.0)
            state *= tl.exp(decay.to(tl.float32))
        if HAS_BETA:
            beta = tl.load(beta_ptr + token * beta_stride_t + head * beta_stride_h).to(tl.float32)
            written = beta * (v - tl.sum(k[:, None] * state, 0))
        state += k[:, None] * written[None, :]
        y = tl.sum((q * scale)[:, None] * state, 0)
        if HAS_SKIP:
            y += skip * v
        out_offsets = token * out_stride_t + head * out_stride_h + e * out_stride_e
        tl.store(out_ptr + out_offsets, y.to(out_ptr.dtype.element_ty), mask=e_mask)

    tl.store(state_ptr + state_offsets, state, mask=state_mask & (slot >= 0))


class Blocks(NamedTuple):
    """The sizes of a launch: rows and columns of a program's part of the state, and its warps."""

    d: int
    e: int
    num_warps: int


def blocks(size: int, value_size: int) -> Blocks:
    """About 32 numbers of the state for each thread, in as many programs as that makes."""
    d = power_of_two(size)
    e = min(power_of_two(value_size), max(8, 1024 // d))
    return Blocks(d, e, num_warps=max(1, d * e // 2048))


class Rule(NamedTuple):
    """What a scan does beside linear attention; each of the tensors may be missing.

    `decay` [T, H, 1 or D, 1 or E], at most 0; with `steps` [T, H, 1 or E] it is [1, H, 1 or D, 1 or E]. `beta` [T, H],
    `skip` [H, 1 or E]. With an `epsilon`, q and k are divided by sqrt(sum_d x[d]^2 + epsilon). What has one number for
    each column has it in all of decay, steps and skip.
    """

    decay: torch.Tensor | None = None
    steps: torch.Tensor | None = None
    beta: torch.Tensor | None = None
    skip: torch.Tensor | None = None
    epsilon: float | None = None


def scan(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, held: Slots, scale: float, rule: Rule
) -> None:
    """Fill `out` [T, H, E], but for padding, and the states.

    `q`, `k` [T, K, D], `v` [T, H, E], state [P, H, D, E] float32, all of any strides; H is a multiple of K.
    """
    heads, value_size = v.shape[1:]
    count, size = held.slots.shape[0], q.shape[2]
    if count == 0 or v.shape[0] == 0:
        return
    sizes = blocks(size, value_size)
    launch: Any = scan_kernel[triton.cdiv(value_size, sizes.e), heads, count]
    others = (rule.decay, rule.steps, rule.beta, rule.skip)
    # Triton launches on the current device, whatever device the tensors are on.
    with torch.cuda.device_of(q):
        launch(
            out,
            q,
            k,
            v,
            *(q if x is None else x for x in others),
            held.state,
            held.slots,
            held.cu_seqlens,
            held.kv_lens,
            scale,
            rule.epsilon or 0.0,
            *(stride for x in (out, q, k, v) for stride in x.stride()),
            *(stride for x, dims in zip(others, (4, 3, 2, 2), strict=True) for stride in _strides(x, dims)),
            *held.state.stride(),
            HAS_DECAY=rule.decay is not None,
            HAS_STEPS=rule.steps is not None,
            HAS_BETA=rule.beta is not None,
            HAS_SKIP=rule.skip is not None,
            NORMALISES=rule.epsilon is not None,
            BY_ROW=rule.decay is not None and rule.decay.shape[2] > 1,
            BY_COLUMN=rule.decay is not None and rule.decay.shape[3] > 1,
            GROUP=heads // q.shape[1],
            SIZE=size,
            VALUE_SIZE=value_size,
            BLOCK_D=sizes.d,
            BLOCK_E=sizes.e,
            num_warps=sizes.num_warps,
        )


def _strides(x: torch.Tensor | None, dims: int) -> tuple[int, ...]:
    return (0,) * dims if x is None else x.stride()
