"""Linear attention for speed in PyTorch: chunks as products of matrices, decoding sequences together."""

from __future__ import annotations

import torch

from precast.kernels.linear_attention.chunks import scan
from precast.kernels.linear_attention.step import step, token_decays
from precast.kernels.stateful.forms import forms
from precast.kernels.stateful.walks import Slots, by_length, together


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor | None, held: Slots, scale: float
) -> torch.Tensor:
    def one(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return step(q * scale, k, v, decay, state)

    # All by name: a tuple of them would hold the scaled query until the scan has ended.
    def several(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return scan(q * scale, k, v, decay, state)

    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    return together(by_length(one, several), (q, k, v, token_decays(decay, v)), out, held)


linear_attention, stateful_linear_attention = forms("linear_attention", _attend)
