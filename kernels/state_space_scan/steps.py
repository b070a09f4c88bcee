"""The step sizes of state space scans."""

from __future__ import annotations

import math

import torch
from torch.nn import functional


def steps(
    dt: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    softplus: bool,
    low: float = -math.inf,
    high: float = math.inf,
) -> torch.Tensor:
    """`dt` [1, T, ...] plus `bias` [...], made positive by softplus if wanted, within `low..high`; in `dtype`."""
    dt = dt.to(dtype)
    if bias is not None:
        dt = dt + bias.to(dtype)
    if softplus:
        dt = functional.softplus(dt)
    return dt.clamp(low, high)
