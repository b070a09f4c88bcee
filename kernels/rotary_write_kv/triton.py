"""Norm and rotation of query and key heads and the write into the cache, in Triton: each element is read once."""

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.attention.triton_write_kv import rounded
from precast.kernels.rms_norm.triton import scale_of, scaled
from precast.kernels.rotary.triton import turned
from precast.kernels.triton_chain import let_next_begin, wait_for_previous


@triton.jit
def _normed(x, factor, scale, CAST_BEFORE_SCALE: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """A part of the heads as their norm leaves it, rounded to `dtype`, in float32."""
    y = (x * factor).to(dtype) if scale is None else scaled(x * factor, scale, CAST_BEFORE_SCALE, dtype)
    return y.to(tl.float32)


@triton.jit
def _turned_heads(  # type: ignore[no-untyped-def]
    x_ptr,
    is_head,
    stride_d,
    weight_ptr,
    weight_stride,
    cos,
    sin,
    eps,
    SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    CAST_BEFORE_SCALE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Heads that begin at `x_ptr` [BLOCK_H, 1]: both elements of the turned pairs, and the rest of each head."""
    r = tl.arange(0, BLOCK_R)[None, :]
    first = 2 * r if INTERLEAVED else r
    second = first + 1 if INTERLEAVED else first + PAIRS
    d = 2 * PAIRS + tl.arange(0, BLOCK_REST)[None, :]
    in_pairs = is_head & (r < PAIRS)
    in_rest = is_head & (d < SIZE)
    given = tl.load(x_ptr + first * stride_d, mask=in_pairs, other=0.0)
    dtype: tl.constexpr = given.dtype
    a = given.to(tl.float32)
    b = tl.load(x_ptr + second * stride_d, mask=in_pairs, other=0.0).to(tl.float32)
    rest = tl.load(x_ptr + d * stride_d, mask=in_rest, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1) + tl.sum(rest * rest, axis=1)
        factor = tl.rsqrt(squares / SIZE + eps)[:, None]
        a_scale, b_scale, rest_scale = None, None, None
        if weight_ptr is not None:
            a_scale = scale_of(weight_ptr + first * weight_stride, r < PAIRS, OFFSET, CAST_BEFORE_SCALE)
            b_scale = scale_of(weight_ptr + second * weight_stride, r < PAIRS, OFFSET, CAST_BEFORE_SCALE)
            rest_scale = scale_of(weight_ptr + d * weight_stride, d < SIZE, OFFSET, CAST_BEFORE_SCALE)
        a = _normed(a, factor, a_scale, CAST_BEFORE_SCALE, dtype)
        b = _normed(b, factor, b_scale, CAST_BEFORE_SCALE, dtype)
        rest = _normed(rest, factor, rest_scale, CAST_BEFORE_SCALE, dtype)
    new_a, new_b = turned(a, b, cos, sin, dtype)  # pyright: ignore[reportGeneralTypeIssues]
    return new_a, new_b, rest.to(dtype)


@triton.jit
def rotary_write_kv_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    k_scale_ptr,
    v_scale_ptr,
    num_slots,
    eps,
    q_stride_t,
    q_stride_h,
    q_stride_d,
    k_stride_t,
    k_stride_h,
    k_stride_d,
    v_stride_t,
    v_stride_h,
    v_stride_d,
    cos_stride_t,
    cos_stride_r,
    sin_stride_t,
    sin_stride_r,
    q_weight_stride,
    k_weight_stride,
    k_cache_stride_p,
    k_cache_stride_s,
    k_cache_stride_h,
    k_cache_stride_d,
    v_cache_stride_p,
    v_cache_stride_s,
    v_cache_stride_h,
    v_cache_stride_d,
    slot_mapping_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    CAST_BEFORE_SCALE: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a token and BLOCK_H of its query heads, or of its keys and values.

    A slot outside of the cache is taken like padding: its keys and values are not written.
    """
    let_next_begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    # An input of the step, which no kernel in front writes.
    slot = tl.load(slot_mapping_ptr + token * slot_mapping_stride)
    wait_for_previous(PDL)
    query_blocks: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    r = tl.arange(0, BLOCK_R)[None, :]
    first = 2 * r if INTERLEAVED else r
    second = first + 1 if INTERLEAVED else first + PAIRS
    d = 2 * PAIRS + tl.arange(0, BLOCK_REST)[None, :]
    cos = tl.load(cos_ptr + token * cos_stride_t + r * cos_stride_r, mask=r < PAIRS, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * sin_stride_t + r * sin_stride_r, mask=r < PAIRS, other=0.0).to(tl.float32)

    if tl.program_id(1) < query_blocks:
        head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        is_head = head < HEADS
        a, b, rest = _turned_heads(
            q_ptr + token * q_stride_t + head * q_stride_h, is_head, q_stride_d, q_weight_ptr, q_weight_stride,
            cos, sin, eps, SIZE, PAIRS, INTERLEAVED, HAS_NORM, OFFSET, CAST_BEFORE_SCALE, BLOCK_R, BLOCK_REST,
        )  # fmt: skip
        y = y_ptr + (token * HEADS + head) * SIZE
        tl.store(y + first, a, mask=is_head & (r < PAIRS))
        tl.store(y + second, b, mask=is_head & (r < PAIRS))
        tl.store(y + d, rest, mask=is_head & (d < SIZE))
    else:
        head = (tl.program_id(1) - query_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        is_head = head < KV_HEADS
        is_written = is_head & (slot >= 0) & (slot < num_slots)
        page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
        a, b, rest = _turned_heads(
            k_ptr + token * k_stride_t + head * k_stride_h, is_head, k_stride_d, k_weight_ptr, k_weight_stride,
            cos, sin, eps, SIZE, PAIRS, INTERLEAVED, HAS_NORM, OFFSET, CAST_BEFORE_SCALE, BLOCK_R, BLOCK_REST,
        )  # fmt: skip
        k_scale = k_scale_ptr
        v_scale = v_scale_ptr
        if k_scale_ptr is not None:
            k_scale = tl.load(k_scale_ptr)
            v_scale = tl.load(v_scale_ptr)
        dtype: tl.constexpr = k_cache_ptr.dtype.element_ty
        keys = k_cache_ptr + page * k_cache_stride_p + offset * k_cache_stride_s + head * k_cache_stride_h
        tl.store(keys + first * k_cache_stride_d, rounded(a, k_scale, dtype, LIMIT), mask=is_written & (r < PAIRS))
        tl.store(keys + second * k_cache_stride_d, rounded(b, k_scale, dtype, LIMIT), mask=is_written & (r < PAIRS))
        tl.store(keys + d * k_cache_stride_d, rounded(rest, k_scale, dtype, LIMIT), mask=is_written & (d < SIZE))

        e = tl.arange(0, BLOCK_V)[None, :]
        in_value = e < VALUE_SIZE
        v = tl.load(v_ptr + token * v_stride_t + head * v_stride_h + e * v_stride_d, mask=is_head & in_value, other=0.0)
        values = v_cache_ptr + page * v_cache_stride_p + offset * v_cache_stride_s + head * v_cache_stride_h
        tl.store(values + e * v_cache_stride_d, rounded(v, v_scale, dtype, LIMIT), mask=is_written & in_value)
