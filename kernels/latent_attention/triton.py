"""paged_latent_attention in Triton, for steps that a CUDA graph replays: absorbed, as
`precast.kernels.latent_attention.batched` explains it, for all sequences. Nothing is read back to the host.

The products with the weight are torch's. Between them a program computes a block of rows, each a query and one of its
heads: latents are the keys of all heads, and what is loaded once for the scores is used again as values. Blocks of
queries, and how a program finds its sequence: `precast.kernels.attention.triton`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from precast.kernels.attention.attend import Pages, check_window
from precast.kernels.attention.triton import LOG2_E, find_sequence, weights_of
from precast.kernels.blocks import power_of_two
from precast.kernels.calls import implements
from precast.kernels.latent_attention.expand import LatentScoring, sizes_of, split

_MANY_ROWS = 64 * 128
"""Queries times heads from which a program takes many rows: with fewer, there are too few programs for all of a GPU."""
_LARGE = ((8, 0), (8, 7), (9, 0), (10, 0), (10, 3))
"""Compute capabilities of 160 KiB of shared memory or more, enough for programs with many rows; others have 99 KiB."""


@triton.jit(do_not_specialize=["num_seqs", "window"])
def latent_attention_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    q_ptr,
    q_rope_ptr,
    cache_ptr,
    cu_seqlens_ptr,
    kv_lens_ptr,
    page_indices_ptr,
    page_indptr_ptr,
    page_start_ptr,
    num_seqs,
    window,
    scale,
    out_stride_t,
    out_stride_h,
    q_stride_t,
    q_stride_h,
    q_rope_stride_t,
    q_rope_stride_h,
    q_rope_stride_r,
    cache_stride_p,
    cache_stride_s,
    HAS_WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """GROUP heads of BLOCK_Q queries of one sequence. Positions are local: less the page list's start."""
    block = tl.program_id(0)
    seq = find_sequence(cu_seqlens_ptr, num_seqs, block, BLOCK_Q)
    first_token = tl.load(cu_seqlens_ptr + seq)
    num_queries = tl.load(cu_seqlens_ptr + seq + 1) - first_token
    first_query = (block - (first_token // BLOCK_Q + seq)) * BLOCK_Q
    if first_query >= num_queries:
        return

    first_page = tl.load(page_indptr_ptr + seq)
    num_pages = tl.load(page_indptr_ptr + seq + 1) - first_page
    kv_len = tl.load(kv_lens_ptr + seq) - tl.load(page_start_ptr + seq)

    row = tl.arange(0, BLOCK_M)
    query = first_query + row // GROUP
    head = (tl.program_id(1) * GROUP + row % GROUP).to(tl.int64)
    row_mask = (row // GROUP < BLOCK_Q) & (query < num_queries) & (head < HEADS)
    token = (first_token + query).to(tl.int64)
    position = kv_len - num_queries + query
    c = tl.arange(0, BLOCK_C)
    r = tl.arange(0, BLOCK_R)
    c_mask, r_mask = c < LATENT, r < ROPE
    q_offsets = token * q_stride_t + head * q_stride_h
    q = tl.load(q_ptr + q_offsets[:, None] + c[None, :], mask=row_mask[:, None] & c_mask[None, :], other=0.0)
    q_offsets = (token * q_rope_stride_t + head * q_rope_stride_h)[:, None] + r[None, :] * q_rope_stride_r
    q_rope = tl.load(q_rope_ptr + q_offsets, mask=row_mask[:, None] & r_mask[None, :], other=0.0)

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    last_query = tl.minimum(first_query + BLOCK_Q, num_queries) - 1
    end = tl.minimum(tl.minimum(kv_len, num_pages * PAGE_SIZE), kv_len - num_queries + last_query + 1)
    start = 0
    if HAS_WINDOW:
        start = tl.maximum(kv_len - num_queries + first_query - window + 1, 0) // BLOCK_N * BLOCK_N

    for first_key in range(start, end, BLOCK_N):
        key = first_key + tl.arange(0, BLOCK_N)
        key_mask = key < end
        page = tl.load(page_indices_ptr + first_page + key // PAGE_SIZE, mask=key_mask, other=0).to(tl.int64)
        slot_ptr = cache_ptr + page * cache_stride_p + key % PAGE_SIZE * cache_stride_s
        latent_mask = key_mask[:, None] & c_mask[None, :]
        latent = tl.load(slot_ptr[:, None] + c[None, :], mask=latent_mask, other=0.0).to(q.dtype)
        rope_mask = r_mask[:, None] & key_mask[None, :]
        rope = tl.load(slot_ptr[None, :] + LATENT + r[:, None], mask=rope_mask, other=0.0).to(q.dtype)

        scores = tl.dot(q, tl.trans(latent), input_precision=PRECISION)
        scores = tl.dot(q_rope, rope, scores, input_precision=PRECISION) * scale
        distance = position[:, None] - key[None, :]
        visible = key_mask[None, :] & (distance >= 0)
        if HAS_WINDOW:
            visible = visible & (distance < window)
        scores = tl.where(visible, scores * LOG2_E, float("-inf"))
        weights, fade, highest, total = weights_of(scores, highest, total)
        acc = acc * fade[:, None] + tl.dot(weights.to(q.dtype), latent, input_precision=PRECISION)

    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_offsets = token * out_stride_t + head * out_stride_h
    out_mask = row_mask[:, None] & c_mask[None, :]
    tl.store(out_ptr + out_offsets[:, None] + c[None, :], acc.to(out_ptr.dtype.element_ty), mask=out_mask)


class Blocks(NamedTuple):
    """The sizes of a launch: queries, heads and rows of a program, keys of a step, and how they are spread and
    pipelined."""

    q: int
    heads: int
    m: int
    n: int
    num_warps: int
    num_stages: int


def blocks(num_tokens: int, heads: int, dtype: torch.dtype, cached: torch.dtype, capability: tuple[int, int]) -> Blocks:
    """Sizes that fit the registers and the shared memory of a compute capability, for latents of MAX_LATENT elements.

    With few tokens there are few rows, and each program gets as few as the tensor cores take; with many, rows enough to
    use a loaded latent often.
    """
    is_wide = dtype.itemsize > 2
    takes_many = num_tokens * heads >= _MANY_ROWS and capability in _LARGE and not is_wide
    # With 64 rows, latents that are converted from 8 bits spill registers.
    m = 16 if not takes_many else 32 if cached.itemsize == 1 else 64
    group = min(heads, m)
    return Blocks(
        q=m // group,
        heads=group,
        m=m,
        n=16 if is_wide else 32,
        num_warps=8 if m > 16 else 4,
        num_stages=1 if is_wide else 2,
    )


@implements("paged_latent_attention")
def paged_latent_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    weight: torch.Tensor,
    pages: Pages,
    value_size: int,
    scoring: LatentScoring,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`precast.paged_latent_attention`, see `precast.kernels.latent_attention.paged`; into `out`, if given."""
    check_window(scoring.window)
    sizes = sizes_of(q, weight, cache.shape[-1] - weight.shape[1], value_size)
    if out is None:
        out = q.new_empty((*q.shape[:-1], value_size))
    if q.shape[1] == 0 or pages.kv_lens.shape[0] == 0:
        return out.zero_()
    keys, values = split(weight, sizes)
    of_heads = q[0].transpose(0, 1)
    # [H, T, C], as the products take and give it.
    q_latent = torch.bmm(of_heads[..., : sizes.nope], keys)
    y = torch.zeros_like(q_latent)  # for padding, whose tokens belong to no program
    _launch(y, q_latent, of_heads[..., sizes.nope :], cache, pages, scoring)
    torch.bmm(y, values.transpose(1, 2), out=out[0].transpose(0, 1))
    return out


def _launch(
    out: torch.Tensor, q: torch.Tensor, q_rope: torch.Tensor, cache: torch.Tensor, pages: Pages, scoring: LatentScoring
) -> None:
    """`out`, `q` [H, T, C], `q_rope` [H, T, Dr], `cache` [P, S, C + Dr]; the rows of all but `q_rope` are dense."""
    heads, num_tokens, latent = q.shape
    num_seqs, rope = pages.kv_lens.shape[0], q_rope.shape[2]
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (9, 0)
    sizes = blocks(num_tokens, heads, q.dtype, cache.dtype, capability)
    launch: Any = latent_attention_kernel[num_tokens // sizes.q + num_seqs, triton.cdiv(heads, sizes.heads)]
    # Triton launches on the current device, whatever device the tensors are on.
    with torch.cuda.device_of(q):
        launch(
            out,
            q,
            q_rope,
            cache,
            *pages,
            num_seqs,
            scoring.window or 0,
            scoring.scale,
            *(stride for x in (out, q, q_rope) for stride in (x.stride(1), x.stride(0))),
            q_rope.stride(2),
            *cache.stride()[:2],
            HAS_WINDOW=scoring.window is not None,
            PAGE_SIZE=cache.shape[1],
            HEADS=heads,
            GROUP=sizes.heads,
            LATENT=latent,
            ROPE=rope,
            BLOCK_Q=sizes.q,
            BLOCK_M=sizes.m,
            BLOCK_N=sizes.n,
            BLOCK_C=max(16, power_of_two(latent)),
            BLOCK_R=max(16, power_of_two(rope)),
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=sizes.num_warps,
            num_stages=sizes.num_stages,
        )
