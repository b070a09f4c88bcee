"""What the ops of attention to selected blocks have in common: the formula for one sequence.

    s[i, h, j] = scale * sum_d q[i, h, d] * k[j, kv(h), d]               H / K query heads share a key head
    p[i, h, j] = exp(s[i, h, j]) / sum_seen_j exp(s[i, h, j])
    y[i, h] = sum_seen_j p[i, h, j] * v[j, kv(h)]

Key j is seen by head h of query i iff j <= i, and block j // block_size is in `selected[i, g(h)]`: H / G neighbouring
heads share what is selected. i and j are positions in the sequence. They are selected in ascending order: an entry of
`selected` that is no number of one of the query's blocks is passed over, as is one that isn't larger than all numbers
before it. With a `tail` query i sees its last block besides, (i + 1) // block_size, unless i ends a block: then it has
whole blocks alone. A query that sees no key gives zeros; one at a position after the last key is taken for one there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from precast.kernels.attention.attend import probabilities
from precast.kernels.block_sparse_attention.limits import MAX_SCORES
from precast.kernels.dtypes import widened


class Blocks(NamedTuple):
    """The size of blocks of keys, and whether a query sees its tail."""

    block_size: int
    tail: bool


class Held(NamedTuple):
    """The keys [L, K, D] and values [L, K, Dv] of a sequence, and the position of the first."""

    k: torch.Tensor
    v: torch.Tensor
    start: int


def attend_blocks(
    q: torch.Tensor, held: Held, selected: torch.Tensor, queries: torch.Tensor, scale: float, blocks: Blocks
) -> torch.Tensor:
    """One sequence: `q` [Q, H, D] at positions `queries` [Q], `selected` [Q, G, M]; [Q, H, Dv] in q's dtype.

    Some queries at a time (`MAX_SCORES`).
    """
    heads, kv_heads = q.shape[1], held.k.shape[1]
    out = q.new_zeros((len(q), heads, held.v.shape[2]))
    if len(held.k) == 0:
        return out
    queries = queries.clamp(max=held.start + len(held.k) - 1)
    wide = widened(q)
    keys, values = held.k.to(wide.dtype), held.v.to(wide.dtype)
    step = max(MAX_SCORES // max(heads * len(keys), 1), 1)
    for first in range(0, len(q), step):
        rows = slice(first, first + step)
        grouped = wide[rows].unflatten(1, (kv_heads, -1))
        scores = torch.einsum("qkgd,lkd->qkgl", grouped, keys).mul_(scale).flatten(1, 2)
        seen = _seen(selected[rows], queries[rows], held, blocks)
        hidden = ~seen.repeat_interleave(heads // seen.shape[1], dim=1)
        shares = probabilities(scores.masked_fill_(hidden, float("-inf")), None).unflatten(1, (kv_heads, -1))
        out[rows] = torch.einsum("qkgl,lkd->qkgd", shares, values).flatten(1, 2).to(q.dtype)
    return out


def _seen(selected: torch.Tensor, queries: torch.Tensor, held: Held, by: Blocks) -> torch.Tensor:
    """Which keys a group of heads of each query sees: [Q, G, L] bool."""
    positions = held.start + torch.arange(len(held.k), device=selected.device)
    blocks = positions // by.block_size - held.start // by.block_size
    last = int(blocks[-1]) + 1
    chosen = selected.long()
    if by.tail:
        tails = ((queries + 1) // by.block_size)[:, None, None]
        chosen = torch.cat((chosen, tails.expand(-1, chosen.shape[1], 1)), dim=-1)
    chosen = torch.where(chosen <= (queries // by.block_size)[:, None, None], chosen, -1)
    highest = functional.pad(chosen, (1, 0), value=-1).cummax(dim=-1).values[..., :-1]
    place = chosen - held.start // by.block_size
    chosen = torch.where((chosen > highest) & (place >= 0) & (place < last), place, last)
    kept = torch.zeros((*chosen.shape[:2], last + 1), dtype=torch.bool, device=selected.device)
    kept.scatter_(-1, chosen, True)
    return kept[..., blocks] & (positions <= queries[:, None])[:, None]
