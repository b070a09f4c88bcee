"""One token of the delta rule, for any number of leading dimensions: heads of one sequence, or of many."""

from __future__ import annotations

import torch

from precast.kernels.delta_rule.limits import EPSILON
from precast.kernels.linear_attention.step import decayed, read, updated


def prepared(x: torch.Tensor, v: torch.Tensor, normalise: bool) -> torch.Tensor:
    """Queries or keys [..., K, D], normalised if wanted, one for each head of `v` [..., H, E]: [..., H, D]."""
    if normalise:
        x = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON)
    return x.repeat_interleave(v.shape[-2] // x.shape[-2], dim=-2)


def step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: `q`, `k` [..., D], `v` [..., E], `decay` [..., 1 or D], `beta` [...], `state` [..., D, E]."""
    state = decayed(state, decay)
    return updated(q, k, beta[..., None] * (v - read(k, state)), state)
