"""What the ops that select blocks have in common: the formula for one sequence.

    s[i, g, j] = sum_d q[i, g, d] * k[j, d]                                            for keys j <= i
    b[i, g, n] = max_j s[i, g, j] over the keys of block n: n * block_size <= j < (n + 1) * block_size
    b[i, g, n] = inf for the block of i itself and those before it, `local` in all
    selected[i, g] = the numbers n of the `count` largest b[i, g, n], in ascending order, then -1

i and j are positions in the sequence, so blocks count from its first token. All heads of the query share one key, and
each selects for a group of the attention's heads. Of blocks with equal scores those of lower numbers are selected
first; NaN is larger than all others. A block without a key that the query sees, or whose score is -inf, is never
selected. A query that sees `count` blocks or fewer selects all of them.

It is the indexer of MiniMax-M3. Its scores have no scale, which wouldn't change their order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from precast.kernels.block_sparse_attention.limits import MAX_SCORES
from precast.kernels.dtypes import widened


class Blocks(NamedTuple):
    """How many blocks a query selects at most, how many keys a block has, and how many of the last blocks are always
    among those that are selected: the op's `count`, `block_size` and `local`."""

    most: int
    size: int
    local: int


def select(q: torch.Tensor, k: torch.Tensor, queries: torch.Tensor, start: int, blocks: Blocks) -> torch.Tensor:
    """One sequence: `q` [Q, G, D] at positions `queries` [Q], `k` [L, D] at positions from `start` on.

    [Q, G, count] int32. Some queries at a time (`MAX_SCORES`), since every head scores every key.
    """
    found = q.new_full((*q.shape[:2], blocks.most), -1, dtype=torch.int32)
    if len(k) == 0:
        return found
    first = start // blocks.size
    step = max(MAX_SCORES // max(q.shape[1] * len(k), 1), 1)
    wide = widened(q)
    keys = k.to(wide.dtype)
    for row in range(0, len(q), step):
        rows = slice(row, row + step)
        scores = _of_blocks(wide[rows], keys, queries[rows], start, blocks)
        numbers = first + torch.arange(scores.shape[-1], device=q.device)
        own = queries[rows, None] // blocks.size
        always = (numbers <= own) & (numbers > own - blocks.local)
        scores = scores.masked_fill(always[:, None], float("inf"))
        # A stable sort keeps equal scores in the order of their blocks.
        best = scores.argsort(dim=-1, descending=True, stable=True)[..., : blocks.most]
        unseen = scores.gather(-1, best) == float("-inf")
        last = torch.iinfo(torch.int32).max
        chosen = numbers[best].masked_fill(unseen, last).sort(dim=-1).values
        found[rows, :, : chosen.shape[-1]] = chosen.masked_fill(chosen == last, -1).to(torch.int32)
    return found


def _of_blocks(q: torch.Tensor, k: torch.Tensor, queries: torch.Tensor, start: int, blocks: Blocks) -> torch.Tensor:
    """The largest score of each block that has keys: [Q, G, N], in the dtype of q."""
    scores = torch.einsum("qgd,ld->qgl", q, k)
    positions = start + torch.arange(len(k), device=q.device)
    scores = scores.masked_fill_((positions > queries[:, None])[:, None], float("-inf"))
    # The first block may have lost keys, and the last one not have got all.
    first = min(-start % blocks.size, len(k))
    whole = (len(k) - first) // blocks.size
    end = first + whole * blocks.size
    parts = [
        scores[..., :first].amax(-1, keepdim=True) if first else None,
        scores[..., first:end].unflatten(-1, (whole, blocks.size)).amax(-1) if whole else None,
        scores[..., end:].amax(-1, keepdim=True) if end < len(k) else None,
    ]
    return torch.cat([part for part in parts if part is not None], dim=-1)
