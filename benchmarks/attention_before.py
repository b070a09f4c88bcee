"""paged_attention in Triton, for prefill, decode and mixed batches in one launch, without reading anything back to the
host. `attention` is the same kernel over pages of one token.

One program computes a block of queries of one sequence for one key head: the rows of its matrices are the queries of
the head's whole group, so that keys and values are loaded once for all of them. How many blocks a sequence has is
known on the device alone. The grid holds `T // BLOCK_Q + B` of them, which is enough for any lengths: sequence b owns
the blocks from `cu_seqlens[b] // BLOCK_Q + b` on, which leaves it at least as many as it needs. A program finds its
sequence by binary search in `cu_seqlens`, and is done at once if its block lies after the sequence's last query.

Scores are kept in base 2: exp2 is an instruction, exp is not. Keys and values of another type than the query's are
converted to its type as they are loaded: products are those of the activations, however the cache is stored.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from precast.kernels.attention.attend import check_window

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    small = tl.exp(-2.0 * tl.abs(x))
    y = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -y, y)


@triton.jit
def find_sequence(cu_seqlens_ptr, num_seqs, block, BLOCK_Q: tl.constexpr):  # type: ignore[no-untyped-def]
    """The last sequence whose first block is at most `block`."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        is_before = tl.load(cu_seqlens_ptr + middle) // BLOCK_Q + middle <= block
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    return low


@triton.jit
def weights_of(scores, highest, total):  # type: ignore[no-untyped-def]
    """Exponentials of scores [M, N] in base 2, for rows that have seen others of at most `highest` [M] before.

    Also the factor by which what was summed over those must be multiplied, and both with the new ones in them: the
    highest and the `total` [M] of the exponentials.
    """
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    # A row that has seen no key yet: -inf less -inf would be NaN.
    reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    fade = tl.exp2(highest - reference)
    weights = tl.exp2(scores - reference[:, None])
    return weights, fade, new_highest, total * fade + tl.sum(weights, 1)


@triton.jit(do_not_specialize=["num_seqs", "window", "chunk"])
def paged_attention_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    sinks_ptr,
    cu_seqlens_ptr,
    kv_lens_ptr,
    page_indices_ptr,
    page_indptr_ptr,
    page_start_ptr,
    slopes_ptr,
    num_seqs,
    window,
    chunk,
    scale,
    soft_cap,
    out_stride_t,
    out_stride_h,
    q_stride_t,
    q_stride_h,
    q_stride_d,
    k_stride_p,
    k_stride_s,
    k_stride_h,
    k_stride_d,
    v_stride_p,
    v_stride_s,
    v_stride_h,
    v_stride_d,
    HAS_SINKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A block of BLOCK_Q queries of one sequence, for one key head. Positions are local: less the page list's start."""
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = find_sequence(cu_seqlens_ptr, num_seqs, block, BLOCK_Q)
    first_token = tl.load(cu_seqlens_ptr + seq)
    num_queries = tl.load(cu_seqlens_ptr + seq + 1) - first_token
    first_query = (block - (first_token // BLOCK_Q + seq)) * BLOCK_Q
    if first_query >= num_queries:
        return

    first_page = tl.load(page_indptr_ptr + seq)
    num_pages = tl.load(page_indptr_ptr + seq + 1) - first_page
    page_start = tl.load(page_start_ptr + seq)
    kv_len = tl.load(kv_lens_ptr + seq) - page_start

    row = tl.arange(0, BLOCK_M)
    query = first_query + row // GROUP
    row_mask = (row // GROUP < BLOCK_Q) & (query < num_queries)
    token = (first_token + query).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    position = kv_len - num_queries + query
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_V)
    q_offsets = token[:, None] * q_stride_t + head[:, None] * q_stride_h + d[None, :] * q_stride_d
    q = tl.load(q_ptr + q_offsets, mask=row_mask[:, None] & (d[None, :] < SIZE), other=0.0)

    if HAS_SINKS:
        # A sink is a key whose value is zero: the sum of weights starts with it.
        highest = tl.load(sinks_ptr + head, mask=row_mask, other=0.0).to(tl.float32) * LOG2_E
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if HAS_SLOPES:
        slope = tl.load(slopes_ptr + head, mask=row_mask, other=0.0)

    last_query = tl.minimum(first_query + BLOCK_Q, num_queries) - 1
    end = tl.minimum(tl.minimum(kv_len, num_pages * PAGE_SIZE), kv_len - num_queries + last_query + 1)
    start = 0
    if HAS_WINDOW:
        start = tl.maximum(kv_len - num_queries + first_query - window + 1, 0) // BLOCK_N * BLOCK_N
    if HAS_CHUNK:
        # Chunks are counted in absolute positions.
        chunk_start = (position + page_start) // chunk * chunk - page_start
        first_chunk = (kv_len - num_queries + first_query + page_start) // chunk * chunk - page_start
        start = tl.maximum(first_chunk, 0) // BLOCK_N * BLOCK_N

    for first_key in range(start, end, BLOCK_N):
        key = first_key + tl.arange(0, BLOCK_N)
        key_mask = key < end
        page = tl.load(page_indices_ptr + first_page + key // PAGE_SIZE, mask=key_mask, other=0).to(tl.int64)
        slot = key % PAGE_SIZE
        k_offsets = page * k_stride_p + slot * k_stride_s + kv_head * k_stride_h
        k_offsets = k_offsets[None, :] + d[:, None] * k_stride_d
        k = tl.load(k_ptr + k_offsets, mask=key_mask[None, :] & (d[:, None] < SIZE), other=0.0).to(q.dtype)
        v_offsets = page * v_stride_p + slot * v_stride_s + kv_head * v_stride_h
        v_offsets = v_offsets[:, None] + e[None, :] * v_stride_d
        v = tl.load(v_ptr + v_offsets, mask=key_mask[:, None] & (e[None, :] < VALUE_SIZE), other=0.0).to(q.dtype)

        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        distance = position[:, None] - key[None, :]
        if HAS_SLOPES:
            scores -= slope[:, None] * distance
        if HAS_SOFT_CAP:
            scores = soft_cap * _tanh(scores / soft_cap)
        visible = key_mask[None, :] & (distance >= 0)
        if HAS_WINDOW:
            visible = visible & (distance < window)
        if HAS_CHUNK:
            visible = visible & (key[None, :] >= chunk_start[:, None])
        scores = tl.where(visible, scores * LOG2_E, float("-inf"))

        weights, fade, highest, total = weights_of(scores, highest, total)
        acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)

    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_offsets = token[:, None] * out_stride_t + head[:, None] * out_stride_h + e[None, :]
    out_mask = row_mask[:, None] & (e[None, :] < VALUE_SIZE)
    tl.store(out_ptr + out_offsets, acc.to(out_ptr.dtype.element_ty), mask=out_mask)


class Blocks(NamedTuple):
    """The sizes of a launch: queries and rows of a program, keys of a step, and how they are spread and pipelined."""

    q: int
    m: int
    n: int
    num_warps: int
    num_stages: int


def power_of_two(size: int) -> int:
    """The least power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def blocks(num_tokens: int, num_seqs: int, group: int, size: int, dtype: torch.dtype) -> Blocks:
    """Sizes that fit the 160 KiB of shared memory and the registers of compute capability 8.0 and 9.0.

    `size` is the larger of head and value size. A batch that may be all decoding gets the least rows that the tensor
    cores take; any other gets rows enough to use a loaded key often.
    """
    wide = dtype.itemsize > 2
    size = power_of_two(size)
    rows = 16 if num_tokens <= num_seqs else 32 if wide or size > 256 else 64
    m = max(rows, power_of_two(group))
    n = max(16, min(64, 8192 // size) // (2 if wide else 1))
    # With four warps, float32 spills registers from 32 rows of 128 on, half precision from 64 rows of 256 on.
    num_warps = 8 if m * size >= (32 * 128 if wide else 64 * 256) else 4
    return Blocks(q=m // group, m=m, n=n, num_warps=num_warps, num_stages=1 if wide else 2)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    sinks: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    kv_lens: torch.Tensor,
    page_indices: torch.Tensor,
    page_indptr: torch.Tensor,
    page_start: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    slopes: torch.Tensor | None = None,
    chunk: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`precast.paged_attention`, see `precast.kernels.attention.paged`; into `out` [1, T, H, Dv], or a new tensor."""
    check_window(window, chunk)
    metadata = (cu_seqlens, kv_lens, page_indices, page_indptr, page_start)
    if out is None:
        out = q.new_empty((*q.shape[:-1], v_cache.shape[-1]))
    out.zero_()  # for padding, whose tokens belong to no program
    if q.shape[1] > 0 and kv_lens.shape[0] > 0:
        _launch(out, q, k_cache, v_cache, sinks, metadata, scale, window, soft_cap, slopes, chunk)
    return out


def _launch(
    out: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    sinks: torch.Tensor | None,
    metadata: tuple[torch.Tensor, ...],
    scale: float,
    window: int | None,
    soft_cap: float | None,
    slopes: torch.Tensor | None,
    chunk: int | None,
) -> None:
    num_tokens, num_heads, size = q.shape[1:]
    page_size, num_kv_heads, value_size = v_cache.shape[1:]
    num_seqs = metadata[1].shape[0]
    group = num_heads // num_kv_heads
    sizes = blocks(num_tokens, num_seqs, group, max(size, value_size), q.dtype)
    launch: Any = paged_attention_kernel[num_tokens // sizes.q + num_seqs, num_kv_heads]
    # Triton launches on the current device, whatever device the tensors are on.
    with torch.cuda.device_of(q):
        launch(
            out,
            q,
            k_cache,
            v_cache,
            sinks if sinks is not None else q,
            *metadata,
            slopes if slopes is not None else q,
            num_seqs,
            window or 0,
            chunk or 0,
            scale,
            soft_cap or 0.0,
            *out.stride()[1:3],
            *q.stride()[1:],
            *k_cache.stride(),
            *v_cache.stride(),
            HAS_SINKS=sinks is not None,
            HAS_WINDOW=window is not None,
            HAS_SOFT_CAP=soft_cap is not None,
            HAS_SLOPES=slopes is not None,
            HAS_CHUNK=chunk is not None,
            PAGE_SIZE=page_size,
            GROUP=group,
            SIZE=size,
            VALUE_SIZE=value_size,
            BLOCK_Q=sizes.q,
            BLOCK_M=sizes.m,
            BLOCK_N=sizes.n,
            BLOCK_D=max(16, power_of_two(size)),
            BLOCK_V=max(16, power_of_two(value_size)),
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=sizes.num_warps,
            num_stages=sizes.num_stages,
        )


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    slopes: torch.Tensor | None = None,
    chunk: int | None = None,
) -> torch.Tensor:
    """`precast.attention`, see `precast.kernels.attention.attention`: each token is a page, its own."""
    tokens = torch.arange(q.shape[1], dtype=torch.int32, device=q.device)
    lengths = cu_seqlens.diff()
    return paged_attention(
        q,
        k.transpose(0, 1),
        v.transpose(0, 1),
        sinks,
        cu_seqlens,
        lengths,
        tokens,
        cu_seqlens,
        torch.zeros_like(lengths),
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        slopes=slopes,
        chunk=chunk,
    )
