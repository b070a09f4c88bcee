"""One token of linear attention, for any number of leading dimensions: heads of one sequence, or of many."""

from __future__ import annotations

import torch


def token_decays(decay: torch.Tensor | None, v: torch.Tensor) -> torch.Tensor:
    """`decay` as [1, T, H, 1] or [1, T, H, D], whatever form it comes in; `v` [1, T, H, E]."""
    shape = (*v.shape[:3], 1)
    if decay is None:
        return v.new_zeros(shape)
    return decay if decay.dim() == 4 else decay[..., None].expand(shape)


def decayed(state: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """`state` [..., D, E] times the exponential of `decay` [..., 1] or [..., D]."""
    return state * decay.exp()[..., None]


def updated(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `q` [..., D] reads, [..., E], after k v^T was added to `state` [..., D, E]; and the new state."""
    state = torch.addcmul(state, k[..., :, None], v[..., None, :])
    return read(q, state), state


def read(q: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """q S: `q` [..., D], `state` [..., D, E]; [..., E]."""
    return torch.matmul(q[..., None, :], state)[..., 0, :]


def step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: `q`, `k` [..., D], `v` [..., E], `decay` [..., 1 or D], `state` [..., D, E]; (q S', S')."""
    return updated(q, k, v, decayed(state, decay))
