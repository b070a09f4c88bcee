"""The state space scan of Mamba 2 in Triton: the scan of `precast.kernels.linear_attention.triton` with c as query, b
as key, x as value, and its state transposed.
"""

from __future__ import annotations

import torch

from precast.kernels.linear_attention.triton import Rule, scan
from precast.kernels.state_space_scan.steps import steps
from precast.kernels.stateful.forms import forms
from precast.kernels.stateful.triton import zeros
from precast.kernels.stateful.walks import Slots


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
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`precast.state_space_scan`, see `precast.kernels.state_space_scan.state_space_scan`; into `out`, if given."""
    out = zeros(out, x, x.shape)
    rule = Rule(
        decay=a[None, :, None, None],
        steps=steps(dt, dt_bias, torch.float32, softplus, dt_min, dt_max)[0, ..., None],
        skip=None if d is None else d[:, None],
    )
    scan(out[0], c[0], b[0], x[0], held._replace(state=held.state.transpose(-1, -2)), 1.0, rule)
    return out


state_space_scan, stateful_state_space_scan = forms("state_space_scan", _scan)
