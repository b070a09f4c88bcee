"""The state space scan of Mamba 2 for speed in PyTorch: it is linear attention with c as query, b as key, step * x as
value and a * step as decay, and its state transposed.
"""

from __future__ import annotations

import torch

from precast.kernels.linear_attention.chunks import scan
from precast.kernels.linear_attention.step import step
from precast.kernels.state_space_scan.state_space_scan import scan_heads
from precast.kernels.stateful.forms import forms
from precast.kernels.stateful.walks import by_length, together

_attend = by_length(step, scan)


def _chunks(
    value: torch.Tensor, decay: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    y, state = _attend(c, b, value, decay[..., None], state.transpose(-1, -2))
    return y, state.transpose(-1, -2)


state_space_scan, stateful_state_space_scan = forms("state_space_scan", scan_heads, together, _chunks)
