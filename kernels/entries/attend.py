"""What the ops of attention over entries have in common: the formula for one sequence.

    s[i, h, e] = scale * sum_d q[i, h, d] * k[e, d]                 for the entries e that query i sees
    lse[i, h]  = log sum_e exp(s[i, h, e])
    y[i, h]    = sum_e exp(s[i, h, e] - lse[i, h]) * k[e]

Entry e is of the tokens at positions `rate * e .. rate * e + rate - 1`. Query i sees it if all of these are at i or
before, `e < (i + 1) // rate`; with a window, if `i - e < window`, for a rate of 1; with a selection, if it is named
there, as often as it is. What names no entry that the query may see is passed over: -1, and whatever else is there. A
query that sees none gives zeros, and -inf for `lse`.

All heads share the entries, which are keys and values at once. `lse` says how much weight `y` has, so that what is
found among the entries of several caches, or beside a sink, can be joined: see `precast.builder.capture.attentions`.
That is why `y` is left in the type that it is computed in.

It is the core attention of DeepSeek-V4, sections 2.3.1 and 2.3.2 of its report: with a rate of 1 over a window, and
over compressed entries, selected ones or all.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from precast.kernels.attention.attend import probabilities
from precast.kernels.dtypes import widened
from precast.kernels.entries.limits import MAX_ENTRIES, MAX_SCORES
from precast.kernels.storage import gathered

Found = tuple[torch.Tensor, torch.Tensor]
"""`y` and `lse`."""


class Rule(NamedTuple):
    """How entries are scored and which ones are seen, the same for all sequences of a call."""

    scale: float
    rate: int
    window: int | None


class Kept(NamedTuple):
    """The entries of a sequence, [L, D], and the number of the first."""

    entries: torch.Tensor
    first: int


def attend(q: torch.Tensor, kept: Kept, selected: torch.Tensor | None, queries: torch.Tensor, rule: Rule) -> Found:
    """One sequence: `q` [Q, H, D] at positions `queries` [Q], `selected` [Q, M]; [Q, H, D] and [Q, H], in float32, or
    float64 for queries of it. Some queries at a time (`MAX_SCORES`, `MAX_ENTRIES`)."""
    wide = widened(q)
    y, lse = torch.zeros_like(wide, memory_format=torch.contiguous_format), wide.new_full(wide.shape[:2], -torch.inf)
    if len(kept.entries) == 0:
        return y, lse
    step = MAX_SCORES // max(q.shape[1] * len(kept.entries), 1)
    if selected is not None:
        step = MAX_ENTRIES // max(selected.shape[1] * q.shape[2], 1)
    for start in range(0, len(q), max(step, 1)):
        rows = slice(start, start + max(step, 1))
        named = None if selected is None else selected[rows]
        y[rows], lse[rows] = _attend(wide[rows], kept, named, queries[rows], rule)
    return y, lse


def _attend(q: torch.Tensor, kept: Kept, selected: torch.Tensor | None, queries: torch.Tensor, rule: Rule) -> Found:
    """As `attend`, all queries at once."""
    numbers = torch.arange(len(kept.entries), device=q.device)[None]
    if selected is not None:
        numbers = selected.long() - kept.first
    # What the query's position is in entries: the last one that it sees.
    last = (queries[:, None] + 1) // rule.rate - 1 - kept.first
    seen = (numbers >= 0) & (numbers <= last) & (numbers < len(kept.entries))
    if rule.window is not None:
        seen &= last - numbers < rule.window
    # Without a selection all queries see the same entries; with one each has its own.
    k, axes = kept.entries, "ed"
    if selected is not None:
        k, axes = gathered(kept.entries, torch.where(seen, numbers, 0)), "qed"
    k = k.to(q.dtype)
    scores = torch.einsum(f"qhd,{axes}->qhe", q, k) * rule.scale
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    return torch.einsum(f"qhe,{axes}->qhd", probabilities(scores, None), k), scores.logsumexp(dim=-1)
