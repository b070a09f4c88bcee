"""The delta rule for speed in PyTorch: chunks as products of matrices, decoding sequences together.

What the tokens of a chunk write depends on what earlier ones wrote: with A the decayed products of keys below the
diagonal, times beta, the differences U solve (I + A) U = beta (V - arriving K S). The system doesn't depend on the
state, so all chunks are solved at once.
"""

from __future__ import annotations

import torch

from precast.kernels.delta_rule.delta_rule import apply_rule
from precast.kernels.delta_rule.step import step
from precast.kernels.linear_attention.chunks import chunk_size, join, products, reach, split
from precast.kernels.stateful.forms import forms
from precast.kernels.stateful.walks import by_length, together


def _scan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole sequences: `q`, `k` [n, L, H, D], `v` [n, L, H, E], `decay` [n, L, H, 1 or D], `beta` [n, L, H]."""
    tokens = q.shape[1]
    size = chunk_size(tokens, decay)
    q, k, v, decay, beta = (split(x, size) for x in (q, k, v, decay, beta[..., None]))
    inner, system = products((q, k), k, decay)
    factors = reach(decay)
    # The solver takes the diagonal as ones.
    written = torch.linalg.solve_triangular(
        beta * system, torch.cat((beta * v, beta * factors.arriving * k), -1), upper=False, unitriangular=True
    )
    values, keys = written.split((v.shape[-1], k.shape[-1]), -1)
    q, k = q * factors.arriving, (k * factors.leaving).transpose(-1, -2)
    y = torch.empty_like(v)
    for g in range(q.shape[2]):
        difference = values[:, :, g] - torch.matmul(keys[:, :, g], state)
        y[:, :, g] = torch.matmul(q[:, :, g], state) + torch.matmul(inner[:, :, g], difference)
        state = state * factors.whole[:, :, g] + torch.matmul(k[:, :, g], difference)
    return join(y, tokens), state


delta_rule, stateful_delta_rule = forms("delta_rule", apply_rule, together, by_length(step, _scan))
