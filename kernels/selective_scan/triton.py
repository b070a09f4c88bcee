"""The selective scan of Mamba 1 in Triton: the scan of `precast.kernels.linear_attention.triton` with c as query, b as
key, x as value, and one head, whose columns are the channels, each with decays and steps of its own.
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
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`precast.selective_scan`, see `precast.kernels.selective_scan.selective_scan`; into `out`, if given."""
    out = zeros(out, x, x.shape)
    rule = Rule(
        decay=a.T[None, None],
        steps=_one_head(steps(dt, dt_bias, torch.float32, softplus)),
        skip=None if d is None else d[None],
    )
    state = held.state.transpose(1, 2)[:, None]
    scan(_one_head(out), _one_head(c), _one_head(b), _one_head(x), held._replace(state=state), 1.0, rule)
    return out


def _one_head(x: torch.Tensor) -> torch.Tensor:
    """[1, T, F] as [T, 1, F]."""
    return x.transpose(0, 1)


selective_scan, stateful_selective_scan = forms("selective_scan", _scan)
