"""Weights of experts made whole numbers in Triton, of formats that hold a matrix with its inputs as rows."""

# To pyright a kernel that is called by another returns nothing.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.triton_chain import wait_for_previous


@triton.jit
def dequantise_kernel(  # type: ignore[no-untyped-def]
    made_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    starts_ptr,
    SIZE_N: tl.constexpr,
    SIZE_K: tl.constexpr,
    GROUP_K: tl.constexpr,
    IS_AWQ: tl.constexpr,
    ZERO_OFFSET: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N outputs of BLOCK_K inputs of expert `program_id(2)`, [SIZE_N, SIZE_K], if any row is its.

    `IS_AWQ`: eight outputs of an input in a word, else eight inputs of an output. In AWQ's words the even ones of eight
    outputs lie in the lower half, then the odd ones.
    """
    wait_for_previous(PDL)
    expert = tl.program_id(2)
    if tl.load(starts_ptr + expert) == tl.load(starts_ptr + expert + 1):
        return
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (n < SIZE_N)[:, None] & (k < SIZE_K)[None, :]
    words_ptr += expert.to(tl.int64) * (SIZE_N * SIZE_K // 8)
    scales_ptr += expert.to(tl.int64) * (SIZE_N * (SIZE_K // GROUP_K))
    zeros_ptr += expert.to(tl.int64) * (SIZE_N // 8 * (SIZE_K // GROUP_K))
    of_output = n % 8 // 2 * 4 + n % 2 * 16 if IS_AWQ else n % 8 * 4
    if IS_AWQ:
        word = tl.load(words_ptr + k[None, :] * (SIZE_N // 8) + (n // 8)[:, None], mask=mask, other=0)
        value = (word >> of_output[:, None]) & 15
    else:
        word = tl.load(words_ptr + (k // 8)[None, :] * SIZE_N + n[:, None], mask=mask, other=0)
        value = (word >> (k % 8 * 4)[None, :]) & 15
    group = k // GROUP_K
    scale = tl.load(scales_ptr + group[None, :] * SIZE_N + n[:, None], mask=mask, other=0.0).to(tl.float32)
    zero = tl.load(zeros_ptr + group[None, :] * (SIZE_N // 8) + (n // 8)[:, None], mask=mask, other=0)
    zero = ((zero >> of_output[:, None]) & 15) + ZERO_OFFSET
    made = ((value - zero).to(tl.float32) * scale).to(made_ptr.dtype.element_ty)
    made_ptr += expert.to(tl.int64) * SIZE_N * SIZE_K
    tl.store(made_ptr + n[:, None] * SIZE_K + k[None, :], made, mask=mask)
