"""Experts in Triton for so few tokens that hardly two of them share an expert: each pair reads its expert's weights.

`up_kernel` makes the activated rows of all pairs, `down_kernel` the sum over a token's pairs. Both add up in float32,
without matrix instructions: what counts is how many bytes of weights are on their way. A token's numbers don't depend
on other tokens.
"""

# To pyright a kernel that is called by another returns nothing.
# pyright: reportGeneralTypeIssues=false

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import os

import triton
import triton.language as tl

from precast.kernels.experts.triton_activation import activated, gated
from precast.kernels.triton_chain import wait_for_previous

_ON_GPU = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")


@triton.jit
def wait_and_release(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """As `wait_for_previous`, but the next kernel begins when all that earlier ones wrote is there."""
    if PDL and _ON_GPU:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def up_kernel(  # type: ignore[no-untyped-def]
    h_ptr,
    x_ptr,
    ids_ptr,
    up_ptr,
    bias_ptr,
    x_stride_t,
    x_stride_k,
    ids_stride_t,
    ids_stride_j,
    up_stride_e,
    up_stride_n,
    up_stride_k,
    bias_stride_e,
    bias_stride_n,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SIZE_K: tl.constexpr,
    SIZE_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PIECES: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N activated numbers of one pair, float32; of a pair without an expert nothing is written.

    PIECES of BLOCK_K numbers of a row are requested together, into registers; or STAGES of them in turn, into shared
    memory.
    """
    wait_and_release(PDL)
    pair = tl.program_id(1)
    token = (pair // TOP_K).to(tl.int64)
    expert = tl.load(ids_ptr + token * ids_stride_t + pair % TOP_K * ids_stride_j)
    if (expert < 0) | (expert >= NUM_EXPERTS):
        return
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_n = n < SIZE_N
    gate_ptrs = up_ptr + expert * up_stride_e + n[:, None] * up_stride_n
    gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    value = gate
    for first in tl.range(0, SIZE_K, PIECES * BLOCK_K, num_stages=STAGES):
        for piece in tl.static_range(PIECES):
            k = first + piece * BLOCK_K + tl.arange(0, BLOCK_K)
            is_k = k < SIZE_K
            mask = is_n[:, None] & is_k[None, :]
            gate_weight = tl.load(gate_ptrs + k[None, :] * up_stride_k, mask=mask, other=0.0)
            if IS_GATED:
                value_ptrs = gate_ptrs + SIZE_N * up_stride_n
                value_weight = tl.load(value_ptrs + k[None, :] * up_stride_k, mask=mask, other=0.0)
            x = tl.load(x_ptr + token * x_stride_t + k * x_stride_k, mask=is_k, other=0.0).to(tl.float32)
            gate += gate_weight.to(tl.float32) * x[None, :]
            if IS_GATED:
                value += value_weight.to(tl.float32) * x[None, :]
    h = tl.sum(gate, 1)
    if HAS_BIAS:
        bias_ptrs = bias_ptr + expert * bias_stride_e + n * bias_stride_n
        h += tl.load(bias_ptrs, mask=is_n, other=0.0).to(tl.float32)
    if IS_GATED:
        values = tl.sum(value, 1)
        if HAS_BIAS:
            values += tl.load(bias_ptrs + SIZE_N * bias_stride_n, mask=is_n, other=0.0).to(tl.float32)
        h = gated(h, values, ACTIVATION, ALPHA, LIMIT, OFFSET)
    else:
        h = activated(h, ACTIVATION, ALPHA)
    tl.store(h_ptr + pair.to(tl.int64) * SIZE_N + n, h, mask=is_n)


@triton.jit
def down_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    h_ptr,
    ids_ptr,
    weights_ptr,
    down_ptr,
    bias_ptr,
    ids_stride_t,
    ids_stride_j,
    weights_stride_t,
    weights_stride_j,
    down_stride_e,
    down_stride_n,
    down_stride_k,
    bias_stride_e,
    bias_stride_n,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SIZE_K: tl.constexpr,
    SIZE_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PIECES: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N numbers of one token: the weighted sum over all of its experts, BLOCK_J of them at most.

    The ids were there before `up_kernel` let this one begin, so the first weights are requested before its rows are.
    """
    token = tl.program_id(1).to(tl.int64)
    j = tl.arange(0, BLOCK_J)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    expert = tl.load(ids_ptr + token * ids_stride_t + j * ids_stride_j, mask=j < TOP_K, other=-1)
    is_expert = (expert >= 0) & (expert < NUM_EXPERTS)
    expert = tl.where(is_expert, expert, 0)
    is_row = is_expert[:, None] & (n < SIZE_N)[None, :]
    rows = expert[:, None] * down_stride_e + n[None, :] * down_stride_n
    down_ptrs = down_ptr + rows[:, :, None] + k[None, None, :] * down_stride_k
    down = tl.load(down_ptrs, mask=is_row[:, :, None] & (k < SIZE_K)[None, None, :], other=0.0)
    if HAS_BIAS:
        biases = tl.load(
            bias_ptr + expert[:, None] * bias_stride_e + n[None, :] * bias_stride_n, mask=is_row, other=0.0
        )
    wait_for_previous(PDL)

    weights_ptrs = weights_ptr + token * weights_stride_t + j * weights_stride_j
    weight = tl.load(weights_ptrs, mask=is_expert, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK_J, BLOCK_N, BLOCK_K], tl.float32)
    h_ptrs = h_ptr + (token * TOP_K + j)[:, None] * SIZE_K + k[None, :]
    h = tl.load(h_ptrs, mask=is_expert[:, None] & (k < SIZE_K)[None, :], other=0.0) * weight[:, None]
    total += down.to(tl.float32) * h[:, None, :]
    for first in tl.range(BLOCK_K, SIZE_K, PIECES * BLOCK_K, num_stages=STAGES):
        for piece in tl.static_range(PIECES):
            start = first + piece * BLOCK_K
            is_k = start + k < SIZE_K
            mask = is_row[:, :, None] & is_k[None, None, :]
            down = tl.load(down_ptrs + start * down_stride_k, mask=mask, other=0.0)
            h = tl.load(h_ptrs + start, mask=is_expert[:, None] & is_k[None, :], other=0.0) * weight[:, None]
            total += down.to(tl.float32) * h[:, None, :]
    each = tl.sum(total, 2)
    if HAS_BIAS:
        each += weight[:, None] * biases.to(tl.float32)
    y = tl.sum(each, 0)
    tl.store(y_ptr + token * SIZE_N + n, y.to(y_ptr.dtype.element_ty), mask=n < SIZE_N)
