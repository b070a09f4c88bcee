"""What the attention ops have in common: the formula for one sequence, and which keys a query may see.

    s[i, h, j] = scale * sum_d q[i, h, d] * k[j, h // G, d]               G query heads share a key head
    s = soft_cap * tanh(s / soft_cap)                                     where there is a soft cap
    p[i, h, j] = exp(s[i, h, j]) / (sum_visible_j exp(s[i, h, j]) + exp(sinks[h]))      0 for keys that i can't see
    y[i, h] = sum_j p[i, h, j] * v[j, h // G]

Key j is visible to query i iff its position is at most i's, and within the window i's is less than `window` ahead.
A query that sees no key gives zeros.
"""

from __future__ import annotations

import torch

from precast.kernels.dtypes import widened


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    soft_cap: float | None,
) -> torch.Tensor:
    """One sequence: `q` [Q, H, D], `k` [L, K, D], `v` [L, K, Dv], `visible` [Q, L] bool; [Q, H, Dv] in q's dtype."""
    group = q.shape[1] // k.shape[1]
    wide = widened(q)
    keys = k.to(wide.dtype).repeat_interleave(group, dim=1)
    values = v.to(wide.dtype).repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,lhd->qhl", wide, keys) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    return torch.einsum("qhl,lhd->qhd", probabilities(scores, sinks), values).to(q.dtype)


def probabilities(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last dimension of `scores` [..., H, L], with one logit more in the denominator of each head.

    A row of nothing but -inf gives zeros.
    """
    # The extra column is the sink, or a logit that weighs nothing; it also gives rows without keys a maximum.
    extra = scores.new_full(scores.shape[:-1], float("-inf")) if sinks is None else sinks.expand(scores.shape[:-1])
    scores = torch.cat((scores, extra[..., None].to(scores.dtype)), dim=-1)
    highest = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - torch.where(highest == float("-inf"), 0.0, highest))
    total = weights.sum(-1, keepdim=True)
    return weights[..., :-1] / torch.where(total == 0, 1.0, total)


def visible_keys(queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
    """Which of `keys` [..., L] each of `queries` [..., Q] may see, both given as positions; [..., Q, L] bool."""
    distance = queries[..., :, None] - keys[..., None, :]
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def check_window(window: int | None) -> None:
    """Raise ValueError for a window that isn't None (full attention) or at least 1."""
    if window is not None and window < 1:
        raise ValueError(f"window: expected None (full attention) or at least 1, found {window}")
