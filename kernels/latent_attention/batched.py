"""Latent attention in PyTorch for speed: by attention over ordinary keys and values, in one of two ways.

*Expanded*: latents are multiplied by the weight once, and attended to as keys and values of every head. *Absorbed*: the
query is multiplied by the key's part of the weight instead, after which the latents themselves are keys and values, of
one head for all queries, and the result is multiplied by the value's part:

    q_nope . (W_k @ latent) = (W_k^T @ q_nope) . latent
    sum_j p_j * (W_v @ latent_j) = W_v @ sum_j p_j * latent_j

Expanding costs work for each key, absorbing more work for each query and key: with few queries a sequence (decoding)
absorbing is cheaper, with many (prefill) expanding. The metadata is read on the host, which on a GPU is a wait.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from precast.kernels.attention import batched
from precast.kernels.attention.attend import Pages, check_window
from precast.kernels.calls import implements
from precast.kernels.latent_attention.expand import LatentScoring, Sizes, expand, sizes_of, split
from precast.kernels.latent_attention.limits import MAX_EXPANDED
from precast.kernels.storage import gathered


@implements("latent_attention")
def latent_attention(
    q: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    weight: torch.Tensor,
    cu_seqlens: torch.Tensor,
    value_size: int,
    scoring: LatentScoring,
) -> torch.Tensor:
    """`precast.latent_attention`, see `precast.kernels.latent_attention.latent_attention`."""
    sizes = sizes_of(q, weight, k_rope.shape[-1], value_size)
    k, v = expand(latent, k_rope, weight, sizes)
    return batched.attention(q, k, v, None, cu_seqlens, **scoring._asdict())


@implements("paged_latent_attention")
def paged_latent_attention(
    q: torch.Tensor, cache: torch.Tensor, weight: torch.Tensor, pages: Pages, value_size: int, scoring: LatentScoring
) -> torch.Tensor:
    """`precast.paged_latent_attention`, see `precast.kernels.latent_attention.paged`."""
    check_window(scoring.window)
    sizes = sizes_of(q, weight, cache.shape[-1] - weight.shape[1], value_size)
    bounds, indptr = pages.cu_seqlens.tolist(), pages.page_indptr.tolist()
    absorbed = [_is_cheaper_absorbed(end - first, sizes) for first, end in pairwise(bounds)]
    if all(absorbed):
        return _absorbed(q, cache, weight, pages, sizes, scoring)
    out = q.new_zeros((*q.shape[:-1], value_size))
    together = [b for b, kept in enumerate(absorbed) if kept]
    if together:
        rows, part = _only(together, pages, bounds, indptr)
        out[:, rows] = _absorbed(q[:, rows], cache, weight, part, sizes, scoring)
    for b, kept in enumerate(absorbed):  # one by one: what is expanded at a time is no more than one sequence
        if not kept:
            rows, part = _only([b], pages, bounds, indptr)
            out[:, rows] = _expanded(q[:, rows], cache, weight, part, sizes, scoring)
    return out


def _is_cheaper_absorbed(queries: int, sizes: Sizes) -> bool:
    """Whether a sequence of so many queries is cheaper to absorb, by its products for each head and key.

    Expanded: C * (Dn + Dv) once, and Dn + Dr + Dv a query. Absorbed: C + Dr + C a query.
    """
    made = sizes.nope + sizes.value
    return queries * (2 * sizes.latent - made) <= sizes.latent * made


def _only(numbers: list[int], pages: Pages, bounds: list[int], indptr: list[int]) -> tuple[torch.Tensor, Pages]:
    """The tokens of these sequences, one after the other, and the metadata of a call for them alone.

    `bounds` and `indptr` are `cu_seqlens` and `page_indptr` on the host.
    """
    device = pages.kv_lens.device
    rows, starts = _ranges(numbers, bounds, device)
    entries, lists = _ranges(numbers, indptr, device)
    kept = torch.tensor(numbers, device=device)
    return rows, Pages(starts, pages.kv_lens[kept], pages.page_indices[entries], lists, pages.page_start[kept])


def _ranges(numbers: list[int], bounds: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The integers of these ranges `bounds[b] .. bounds[b + 1]`, and the bounds of the ranges among them, int32."""
    found: list[int] = []
    ends = [0]
    for b in numbers:
        found.extend(range(bounds[b], bounds[b + 1]))
        ends.append(len(found))
    return torch.tensor(found, dtype=torch.int64, device=device), torch.tensor(ends, dtype=torch.int32, device=device)


def _absorbed(
    q: torch.Tensor, cache: torch.Tensor, weight: torch.Tensor, pages: Pages, sizes: Sizes, scoring: LatentScoring
) -> torch.Tensor:
    keys, values = split(weight, sizes)
    q_latent = torch.einsum("bthd,hdc->bthc", q[..., : sizes.nope], keys)
    q_latent = torch.cat((q_latent, q[..., sizes.nope :]), dim=-1)
    one_head = cache[:, :, None]
    y = batched.paged_attention(q_latent, one_head, one_head[..., : sizes.latent], None, *pages, **scoring._asdict())
    return torch.einsum("bthc,hdc->bthd", y, values).contiguous()


def _expanded(
    q: torch.Tensor, cache: torch.Tensor, weight: torch.Tensor, pages: Pages, sizes: Sizes, scoring: LatentScoring
) -> torch.Tensor:
    """As pages of keys and values in the order of the page lists, for as many heads at a time as fit."""
    kept = gathered(cache, pages.page_indices).to(q.dtype)
    latent, k_rope = kept[..., : sizes.latent], kept[..., sizes.latent :]
    numbered = pages._replace(page_indices=torch.arange(len(kept), dtype=torch.int32, device=q.device))
    a_head = kept.shape[0] * kept.shape[1] * (q.shape[-1] + sizes.value)
    step = max(MAX_EXPANDED // max(a_head, 1), 1)
    rows = sizes.nope + sizes.value

    def some_heads(first: int, end: int) -> torch.Tensor:
        k, v = expand(latent, k_rope, weight[first * rows : end * rows], sizes._replace(heads=end - first))
        return batched.paged_attention(q[:, :, first:end], k, v, None, *numbered, **scoring._asdict())

    ends = range(step, sizes.heads + step, step)
    return torch.cat([some_heads(end - step, min(end, sizes.heads)) for end in ends], dim=2)
