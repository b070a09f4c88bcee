"""Linear attention for speed in PyTorch: chunks as products of matrices, decoding sequences together."""

from __future__ import annotations

import torch

from precast.kernels.linear_attention.chunks import scan
from precast.kernels.linear_attention.step import step, token_decays
from precast.kernels.states import Slots, fresh, together


def linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """`precast.linear_attention`, see `precast.kernels.linear_attention.linear_attention`."""
    return _attend(q, k, v, decay, fresh(cu_seqlens, (*v.shape[2:3], q.shape[3], v.shape[3]), q), scale)


def stateful_linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor | None,
    state: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """`precast.stateful_linear_attention`, see `precast.kernels.linear_attention.stateful`."""
    return _attend(q, k, v, decay, Slots(state, slots, cu_seqlens, kv_lens), scale)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor | None, held: Slots, scale: float
) -> torch.Tensor:
    def batch(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if q.shape[1] > 1:
            return scan(q * scale, k, v, decay, state)
        y, state = step(q[:, 0] * scale, k[:, 0], v[:, 0], decay[:, 0], state)
        return y[:, None], state

    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    return together(batch, (q, k, v, token_decays(decay, v)), out, held)
