"""Attention in PyTorch for speed without a kernel of our own: no work for keys that no query of a tile can see,
decoding sequences together. It reads the metadata on the host, which on a GPU is a wait; the Triton kernel has none.

Sequences that are decoding (one query) are sorted into classes of like length. As many of a class as `MAX_GATHERED`
allows are one product, over pages padded to the longest list of the class. Others go one by one, in tiles of queries.
Products without slopes, bias, soft cap and sinks are `scaled_dot_product_attention`: it has no place for the last two,
and takes a mask of numbers in q's dtype alone, which is too coarse for slopes over long distances.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch.nn import functional

from precast.kernels.attention.attend import (
    Pages,
    Scales,
    Scoring,
    by_distance,
    check_window,
    first_seen,
    probabilities,
    visible_keys,
)
from precast.kernels.attention.limits import MAX_GATHERED, TILE
from precast.kernels.calls import implements
from precast.kernels.dtypes import widened
from precast.kernels.storage import gathered


class _Cache(NamedTuple):
    """The pages of all sequences, and the lists that name them."""

    k: torch.Tensor
    v: torch.Tensor
    page_indices: torch.Tensor


class _Sequence(NamedTuple):
    """One sequence of a paged call. Positions are absolute; `first_page .. end_page` have the keys from `start` on."""

    row: int
    queries: int
    position: int  # of the first query
    start: int
    keys: int
    first_page: int
    end_page: int


@implements("attention")
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """`precast.attention`, see `precast.kernels.attention.attention`."""
    check_window(scoring.window, scoring.chunk)
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    for first, end in pairwise(cu_seqlens.tolist()):
        rows = slice(first, end)
        _in_tiles(out[0, rows], q[0, rows], k[0, rows], v[0, rows], 0, 0, scoring.of(rows))
    return out


@implements("paged_attention")
def paged_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, pages: Pages, scoring: Scoring, scales: Scales
) -> torch.Tensor:
    """`precast.paged_attention`, see `precast.kernels.attention.paged`."""
    check_window(scoring.window, scoring.chunk)
    if scales.k_scale is not None:  # scores are products of keys, and results sums of values
        scoring = scoring._replace(scale=scoring.scale * scales.k_scale.item())
    cache = _Cache(k_cache, v_cache, pages.page_indices)
    out = q.new_zeros((*q.shape[:-1], v_cache.shape[-1]))
    decoding: dict[int, list[_Sequence]] = {}
    for sequence in _sequences(pages, k_cache.shape[1], scoring):
        if sequence.queries == 1:
            # Lists of one class differ by less than a factor of two: that bounds what padding costs.
            decoding.setdefault((sequence.end_page - sequence.first_page).bit_length(), []).append(sequence)
            continue
        _prefill(out, q, cache, sequence, scoring)
    elements = k_cache[:1].numel() + v_cache[:1].numel()
    for sequences in decoding.values():
        longest = max(sequence.end_page - sequence.first_page for sequence in sequences)
        step = max(1, MAX_GATHERED // max(1, longest * elements))
        for first in range(0, len(sequences), step):
            _decode(out, q, cache, sequences[first : first + step], scoring)
    return out if scales.v_scale is None else out.mul_(scales.v_scale)


def _sequences(pages: Pages, page_size: int, scoring: Scoring) -> list[_Sequence]:
    """The sequences that have queries and keys, without pages that no query sees or that lie past the last key."""
    bounds, indptr = pages.cu_seqlens.tolist(), pages.page_indptr.tolist()
    found = []
    for b, (kv_len, start) in enumerate(zip(pages.kv_lens.tolist(), pages.page_start.tolist(), strict=True)):
        queries = bounds[b + 1] - bounds[b]
        position = kv_len - queries
        keys = min(kv_len - start, (indptr[b + 1] - indptr[b]) * page_size)
        skipped = max(first_seen(position, scoring.window, scoring.chunk) - start, 0) // page_size
        held = -(-keys // page_size)
        if queries > 0 and held > skipped:
            slots = skipped * page_size
            first, end = indptr[b] + skipped, indptr[b] + held
            found.append(_Sequence(bounds[b], queries, position, start + slots, keys - slots, first, end))
    return found


def _prefill(out: torch.Tensor, q: torch.Tensor, cache: _Cache, sequence: _Sequence, scoring: Scoring) -> None:
    """A sequence of several queries; into `out`."""
    pages = cache.page_indices[sequence.first_page : sequence.end_page]
    k = gathered(cache.k, pages).flatten(0, 1)[: sequence.keys]
    v = gathered(cache.v, pages).flatten(0, 1)[: sequence.keys]
    rows = slice(sequence.row, sequence.row + sequence.queries)
    _in_tiles(out[0, rows], q[0, rows], k, v, sequence.position, sequence.start, scoring.of(rows))


def _in_tiles(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: int, start: int, scoring: Scoring
) -> None:
    """One sequence: `q` [Q, H, D] from `position` on, over `k`, `v` [L, K, .] from position `start` on; into `out`."""
    for first in range(0, q.shape[0], TILE):
        end = min(first + TILE, q.shape[0])
        low = max(first_seen(position + first, scoring.window, scoring.chunk) - start, 0)
        high = min(position + end - start, k.shape[0])
        if high <= low:
            continue
        queries = torch.arange(position + first, position + end, device=q.device)[None]
        keys = torch.arange(start + low, start + high, device=q.device)[None]
        visible = visible_keys(queries, keys, scoring.window, scoring.chunk)
        part = (q[None, first:end], k[None, low:high], v[None, low:high])
        own = scoring if scoring.bias is None else scoring._replace(bias=scoring.bias[None, first:end])
        out[first:end] = _product(*part, visible, _distance(queries, keys, scoring), own)[0]


def _decode(out: torch.Tensor, q: torch.Tensor, cache: _Cache, sequences: list[_Sequence], scoring: Scoring) -> None:
    """Sequences of one query each, in one product; into `out`."""
    rows, positions, starts, lengths, first_pages, counts = torch.tensor(
        [(s.row, s.position, s.start, s.keys, s.first_page, s.end_page - s.first_page) for s in sequences],
        device=q.device,
    ).unbind(1)
    column = torch.arange(max(s.end_page - s.first_page for s in sequences), device=q.device)
    # Lists shorter than the longest repeat their first page; its slots are masked like others without a key.
    table = cache.page_indices[first_pages[:, None] + torch.where(column < counts[:, None], column, 0)]
    slots = torch.arange(len(column) * cache.k.shape[1], device=q.device)
    empty = slots >= lengths[:, None]
    # Slots without a key hold anything, NaN too; a probability of zero would not keep that out of a product.
    k = gathered(cache.k, table).flatten(1, 2).to(q.dtype).masked_fill_(empty[..., None, None], 0)
    v = gathered(cache.v, table).flatten(1, 2).to(q.dtype).masked_fill_(empty[..., None, None], 0)
    queries, keys = positions[:, None], starts[:, None] + slots
    visible = visible_keys(queries, keys, scoring.window, scoring.chunk) & ~empty[:, None]
    own = scoring if scoring.bias is None else scoring._replace(bias=scoring.bias[0, rows][:, None])
    out[0, rows] = _product(q[0, rows][:, None], k, v, visible, _distance(queries, keys, scoring), own)[:, 0]


def _distance(queries: torch.Tensor, keys: torch.Tensor, scoring: Scoring) -> torch.Tensor | None:
    """The positions of `keys` [B, L] less those of `queries` [B, Q], [B, Q, L]; None where nothing asks for them."""
    return None if scoring.slopes is None and scoring.bias is None else keys[:, None, :] - queries[:, :, None]


def _product(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    distance: torch.Tensor | None,
    scoring: Scoring,
) -> torch.Tensor:
    """`q` [B, Q, H, D] over `k`, `v` [B, L, K, .] where `visible` [B, Q, L]; [B, Q, H, Dv] in q's dtype. A bias is
    [B, Q, H, R]."""
    batch, queries, heads, size = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    # The queries of one key head become rows of one matrix, so that no key is repeated for its group.
    rows = q.view(batch, queries, kv_heads, group, size).transpose(1, 2).reshape(batch, kv_heads, -1, size)
    k, v = k.transpose(1, 2).to(q.dtype), v.transpose(1, 2).to(q.dtype)
    mask = _for_each_row(visible, group)
    if scoring.sinks is None and scoring.soft_cap is None and distance is None:
        if rows.is_cuda:  # its kernels don't ask at which address a part of a tensor begins, and some stumble on it
            k, v = k.contiguous(), v.contiguous()
        y = functional.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scoring.scale)
        # What a row gives that sees nothing, torch leaves to each of its kernels.
        y = torch.where(mask.any(-1, keepdim=True), y, 0.0)
    else:
        extra = None if distance is None else _extra_scores(distance, kv_heads, group, scoring)
        y = _with_extras(rows, k, v, mask, extra, scoring)
    return y.view(batch, kv_heads, queries, group, -1).transpose(1, 2).reshape(batch, queries, heads, -1)


def _for_each_row(x: torch.Tensor, group: int) -> torch.Tensor:
    """`x` [B, Q, L] for the rows of one key head, its group's heads once for each query: [B, 1, Q * G, L]."""
    return x.repeat_interleave(group, dim=1)[:, None]


def _extra_scores(distance: torch.Tensor, kv_heads: int, group: int, scoring: Scoring) -> torch.Tensor:
    """What slopes and a bias add to the scores of rows, for keys at a `distance` [B, Q, L]: [B, K, Q * G, L]."""
    found = distance.new_zeros((), dtype=torch.float32)
    if scoring.slopes is not None:
        num_rows = distance.shape[1] * group
        found = _for_rows(scoring.slopes, kv_heads, num_rows)[:, :, None] * _for_each_row(distance, group)
    if scoring.bias is not None:
        batch, queries, *_ = scoring.bias.shape
        heads = by_distance(scoring.bias, -distance).view(batch, queries, kv_heads, group, -1)
        found = found + heads.transpose(1, 2).reshape(batch, kv_heads, queries * group, -1)
    return found


def _for_rows(heads: torch.Tensor, kv_heads: int, num_rows: int) -> torch.Tensor:
    """A number for each of the `heads` [H], for the rows of each key head: [K, Q * G]."""
    group = len(heads) // kv_heads
    return heads.view(kv_heads, 1, group).expand(-1, num_rows // group, -1).reshape(kv_heads, num_rows)


def _with_extras(
    rows: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    extra: torch.Tensor | None,
    scoring: Scoring,
) -> torch.Tensor:
    """The product in float32 with what is added to the scores, soft cap and sinks; `rows` [B, K, Q * G, D], `mask`
    [B, 1, Q * G, L], `extra` [B, K, Q * G, L]."""
    scores = torch.matmul(widened(rows), widened(k).transpose(-1, -2)) * scoring.scale
    if extra is not None:
        scores = scores + extra
    if scoring.soft_cap is not None:
        scores = scoring.soft_cap * torch.tanh(scores / scoring.soft_cap)
    scores = scores.masked_fill(~mask, float("-inf"))
    sinks = None if scoring.sinks is None else _for_rows(scoring.sinks, *rows.shape[1:3])
    return torch.matmul(probabilities(scores, sinks), widened(v)).to(rows.dtype)
