"""write_kv in Triton: one program a token and head copies its key and its value; programs of padding do nothing."""

# To pyright, Triton's constants don't decide which branch is there, are no types, and some functions never return.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded(x, scale, dtype: tl.constexpr, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """`precast.kernels.storage.rounded`; `scale` may be None, LIMIT is the largest finite value of 8 bits, 0 for wider
    types."""
    if scale is not None:
        x = tl.div_rn(x.to(tl.float32), scale)
    if LIMIT > 0:
        x = tl.clamp(x.to(tl.float32), -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)


@triton.jit
def write_kv_kernel(  # type: ignore[no-untyped-def]
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    k_scale_ptr,
    v_scale_ptr,
    num_slots,
    k_stride_t,
    k_stride_h,
    k_stride_d,
    v_stride_t,
    v_stride_h,
    v_stride_d,
    k_cache_stride_p,
    k_cache_stride_s,
    k_cache_stride_h,
    k_cache_stride_d,
    v_cache_stride_p,
    v_cache_stride_s,
    v_cache_stride_h,
    v_cache_stride_d,
    PAGE_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """The key and value of one token and head. A slot outside of the cache is taken like padding: never written."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slot_mapping_ptr + token)
    if (slot < 0) | (slot >= num_slots):
        return
    page = slot // PAGE_SIZE
    offset = slot % PAGE_SIZE
    k_scale = k_scale_ptr
    v_scale = v_scale_ptr
    if k_scale_ptr is not None:
        k_scale = tl.load(k_scale_ptr)
        v_scale = tl.load(v_scale_ptr)

    d = tl.arange(0, BLOCK_D)
    k = tl.load(k_ptr + token * k_stride_t + head * k_stride_h + d * k_stride_d, mask=d < SIZE)
    k_cache_ptr += page * k_cache_stride_p + offset * k_cache_stride_s + head * k_cache_stride_h
    new_k = rounded(k, k_scale, k_cache_ptr.dtype.element_ty, LIMIT)
    tl.store(k_cache_ptr + d * k_cache_stride_d, new_k, mask=d < SIZE)

    e = tl.arange(0, BLOCK_V)
    v = tl.load(v_ptr + token * v_stride_t + head * v_stride_h + e * v_stride_d, mask=e < VALUE_SIZE)
    v_cache_ptr += page * v_cache_stride_p + offset * v_cache_stride_s + head * v_cache_stride_h
    new_v = rounded(v, v_scale, v_cache_ptr.dtype.element_ty, LIMIT)
    tl.store(v_cache_ptr + e * v_cache_stride_d, new_v, mask=e < VALUE_SIZE)
