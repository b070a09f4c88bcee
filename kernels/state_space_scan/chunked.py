"""The state space scan of Mamba 2 for speed in PyTorch: it is linear attention with c as query, b as key, step * x as
value and a * step as decay, and its state transposed.
"""

from __future__ import annotations

import torch

from precast.kernels.forms import forms
from precast.kernels.linear_attention.chunks import scan
from precast.kernels.linear_attention.step import step
from precast.kernels.state_space_scan.steps import steps
from precast.kernels.states import Slots, computed_in, together


def _scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    held: Slots,
    softplus: bool,
    dt_min: float,
    dt_max: float,
) -> torch.Tensor:
    size = steps(dt, dt_bias, computed_in(x), softplus, dt_min, dt_max)
    heads, groups = x.shape[2], b.shape[2]

    def batch(
        x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        b, c = (z.repeat_interleave(heads // groups, dim=2) for z in (b, c))
        value, decay = dt[..., None] * x, (a.to(dt.dtype) * dt)[..., None]
        state = state.transpose(-1, -2)
        if x.shape[1] > 1:
            y, state = scan(c, b, value, decay, state)
        else:
            y, state = step(c[:, 0], b[:, 0], value[:, 0], decay[:, 0], state)
            y = y[:, None]
        return y if d is None else y + d[:, None] * x, state.transpose(-1, -2)

    return together(batch, (x, size, b, c), x.new_zeros(x.shape), held)


state_space_scan, stateful_state_space_scan = forms("state_space_scan", _scan)
