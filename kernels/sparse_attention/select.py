"""What the ops that select keys have in common: the formula for one sequence.

    s[i, j] = sum_h weights[i, h] * max(scale * sum_d q[i, h, d] * k[j, d], 0)           for keys j <= i
    selected[i] = the positions j of the `count` largest s[i, j], in ascending order, then -1

i and j are positions in the sequence. All heads of the query share one key. Of keys with equal scores those of lower
positions are selected first, so that the selection says nothing of pages, of batches or of the order of a sort; a score
of -0 equals 0, and NaN is larger than all others. A query that sees `count` keys or fewer selects all of them.

It is the "lightning indexer" of DeepSeek-V3.2, without the Hadamard transform of q and k, which changes no product, and
without rounding to 8 bits.
"""

from __future__ import annotations

import torch

from precast.kernels.dtypes import widened
from precast.kernels.sparse_attention.limits import MAX_SCORES


def select(
    q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, scale: float,
    count: int,
) -> torch.Tensor:  # fmt: skip
    """One sequence: `q` [Q, H, D], `weights` [Q, H], `k` [L, D] at positions `queries` [Q] and `keys` [L], ascending.

    [Q, count] int32. Some queries at a time (`MAX_SCORES`), since every head scores every key.
    """
    step = max(MAX_SCORES // max(q.shape[1] * len(k), 1), 1)
    found = q.new_full((len(q), count), -1, dtype=torch.int32)
    for first in range(0, len(q), step):
        rows = slice(first, first + step)
        scores = _scores(q[rows], weights[rows], k, scale)
        scores = scores.masked_fill(keys > queries[rows, None], float("-inf"))
        # A stable sort keeps equal scores in the order of their positions.
        best = scores.argsort(dim=-1, descending=True, stable=True)[:, :count]
        places = keys[best]
        hidden = places > queries[rows, None]
        last = torch.iinfo(torch.int32).max
        places = places.masked_fill(hidden, last).sort(dim=-1).values
        found[rows, : places.shape[1]] = places.masked_fill(places == last, -1).to(torch.int32)
    return found


def _scores(q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """[Q, L], in float32, or float64 for queries of it."""
    wide = widened(q)
    products = torch.einsum("qhd,ld->qhl", wide, k.to(wide.dtype)) * scale
    return torch.einsum("qh,qhl->ql", weights.to(wide.dtype), products.relu_()) + 0.0
