"""Rotary embedding and its tables in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.triton_chain import wait_for_previous


@triton.jit
def turned(a, b, cos, sin, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pairs (a, b), float32, turned by angles, in `dtype`."""
    return (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)


@triton.jit
def rotary_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    x_ptr,
    cos_ptr,
    sin_ptr,
    num_heads,
    x_stride_t,
    x_stride_h,
    x_stride_d,
    cos_stride_t,
    cos_stride_r,
    sin_stride_t,
    sin_stride_r,
    SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a token and BLOCK_H heads of SIZE elements, of which the first 2 * PAIRS are turned."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    r = tl.arange(0, BLOCK_R)[None, :]
    first = 2 * r if INTERLEAVED else r
    second = first + 1 if INTERLEAVED else first + PAIRS
    mask = (head < num_heads) & (r < PAIRS)
    x_ptr += token * x_stride_t + head * x_stride_h
    y_ptr += (token * num_heads + head) * SIZE
    wait_for_previous(PDL)

    cos = tl.load(cos_ptr + token * cos_stride_t + r * cos_stride_r, mask=r < PAIRS, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * sin_stride_t + r * sin_stride_r, mask=r < PAIRS, other=0.0).to(tl.float32)
    a = tl.load(x_ptr + first * x_stride_d, mask=mask, other=0.0)
    b = tl.load(x_ptr + second * x_stride_d, mask=mask, other=0.0)
    new_a, new_b = turned(a.to(tl.float32), b.to(tl.float32), cos, sin, a.dtype)
    tl.store(y_ptr + first, new_a, mask=mask)
    tl.store(y_ptr + second, new_b, mask=mask)
    if 2 * PAIRS < SIZE:
        d = 2 * PAIRS + tl.arange(0, BLOCK_REST)[None, :]
        mask = (head < num_heads) & (d < SIZE)
        tl.store(y_ptr + d, tl.load(x_ptr + d * x_stride_d, mask=mask), mask=mask)


@triton.jit
def rotary_tables_kernel(  # type: ignore[no-untyped-def]
    cos_ptr,
    sin_ptr,
    positions_ptr,
    inv_freq_ptr,
    num_tokens,
    scale,
    positions_stride_t,
    inv_freq_stride_t,
    inv_freq_stride_r,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a block of BLOCK elements of the tables [T, PAIRS]."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    token, r = element // PAIRS, element % PAIRS
    mask = token < num_tokens
    wait_for_previous(PDL)

    position = tl.load(positions_ptr + token * positions_stride_t, mask=mask, other=0).to(tl.float32)
    source = inv_freq_ptr + token * inv_freq_stride_t + r * inv_freq_stride_r
    angle = position * tl.load(source, mask=mask, other=0.0)
    tl.store(cos_ptr + element, (tl.cos(angle) * scale).to(cos_ptr.dtype.element_ty), mask=mask)
    tl.store(sin_ptr + element, (tl.sin(angle) * scale).to(sin_ptr.dtype.element_ty), mask=mask)
