"""What the attention ops have in common: the formula for one sequence, and which keys a query may see.

    s[i, h, j] = scale * sum_d q[i, h, d] * k[j, h // G, d]               G query heads share a key head
    s[i, h, j] += slopes[h] * (j - i)                                     where there are slopes (ALiBi)
    s[i, h, j] += bias[i, h, i - j]                                       where there is a bias, for i - j < its size
    s = soft_cap * tanh(s / soft_cap)                                     where there is a soft cap
    p[i, h, j] = exp(s[i, h, j]) / (sum_visible_j exp(s[i, h, j]) + exp(sinks[h]))      0 for keys that i can't see
    y[i, h] = sum_j p[i, h, j] * v[j, h // G]

i and j are absolute positions: those in the sequence. Key j is visible to query i iff j <= i and, with a window,
i - j < window; with chunks, i // chunk == j // chunk. A query that sees no key gives zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from precast.kernels.dtypes import widened


class Scoring(NamedTuple):
    """How keys are scored, the same for all sequences of a call."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    slopes: torch.Tensor | None = None
    chunk: int | None = None
    sinks: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def of(self, rows: slice | torch.Tensor) -> Scoring:
        """The same for these rows of all tokens: a bias of theirs, [Q, H, R]."""
        return self if self.bias is None else self._replace(bias=self.bias[0, rows])


class Pages(NamedTuple):
    """The metadata of a call over pages, int32: `cu_seqlens`, `page_indptr` [B + 1]; `kv_lens`, `page_start` [B];
    `page_indices` [N]."""

    cu_seqlens: torch.Tensor
    kv_lens: torch.Tensor
    page_indices: torch.Tensor
    page_indptr: torch.Tensor
    page_start: torch.Tensor


class Scales(NamedTuple):
    """What cached keys and values were divided by, [1] float32; None: by nothing."""

    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """One sequence: `q` [Q, H, D], `k` [L, K, D], `v` [L, K, Dv] at positions `queries` [Q] and `keys` [L], with a bias
    of its queries (`Scoring.of`); [Q, H, Dv] in q's dtype."""
    group = q.shape[1] // k.shape[1]
    wide = widened(q)
    values = v.to(wide.dtype).repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,lhd->qhl", wide, k.to(wide.dtype).repeat_interleave(group, dim=1)) * scoring.scale
    if scoring.slopes is not None:
        scores = scores + scoring.slopes[:, None] * (keys - queries[:, None])[:, None]
    if scoring.bias is not None:
        scores = scores + by_distance(scoring.bias, queries[:, None] - keys)
    if scoring.soft_cap is not None:
        scores = scoring.soft_cap * torch.tanh(scores / scoring.soft_cap)
    visible = visible_keys(queries, keys, scoring.window, scoring.chunk)
    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    return torch.einsum("qhl,lhd->qhd", probabilities(scores, scoring.sinks), values).to(q.dtype)


def by_distance(bias: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """What `bias` [..., H, R] says of keys that are `distance` [..., L] before their query: [..., H, L] in float32, 0
    for those that are no nearer than R, or come later."""
    near = (distance >= 0) & (distance < bias.shape[-1])
    at = distance.clamp(0, bias.shape[-1] - 1)[..., None, :].expand(*bias.shape[:-1], -1)
    return torch.where(near[..., None, :], bias.gather(-1, at).float(), 0.0)


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


def visible_keys(
    queries: torch.Tensor, keys: torch.Tensor, window: int | None, chunk: int | None = None
) -> torch.Tensor:
    """Which of `keys` [..., L] each of `queries` [..., Q] may see, both given as positions; [..., Q, L] bool.

    With a `chunk` the positions are absolute; without one, only their differences count.
    """
    queries, keys = queries[..., :, None], keys[..., None, :]
    visible = keys <= queries
    if window is not None:
        visible = visible & (queries - keys < window)
    if chunk is not None:
        visible = visible & (queries // chunk == keys // chunk)
    return visible


def first_seen(query: int, window: int | None, chunk: int | None) -> int:
    """The position of the first key that the query at position `query` sees, both absolute."""
    if window is not None:
        return max(query - window + 1, 0)
    return 0 if chunk is None else max(query // chunk * chunk, 0)


def check_window(window: int | None, chunk: int | None = None) -> None:
    """Raise ValueError for a window or a chunk that isn't None or at least 1, and for both at once."""
    if window is not None and window < 1:
        raise ValueError(f"window: expected None (full attention) or at least 1, found {window}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk: expected None (full attention) or at least 1, found {chunk}")
    if window is not None and chunk is not None:
        raise ValueError(f"expected a window or chunks, found window {window} and chunk {chunk}")
