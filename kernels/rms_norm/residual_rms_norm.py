"""residual_rms_norm@1: s = x + residual, rounded to x's dtype; y = rms_norm(s, weight); returns (y, s).

One read and one write of the residual stream, where `rms_norm` after a sum has two of each.
"""

from __future__ import annotations

import torch

from precast.kernels.dtypes import FLOAT
from precast.kernels.rms_norm.rms_norm import rms_norm
from precast.kernels.spec import ELEMENTWISE, OpSpec


def residual_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    cast_before_scale: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of `x + residual` [..., D], and that sum; both of `x`'s shape and dtype, contiguous, new memory."""
    total = (x + residual).contiguous()
    return rms_norm(total, weight, eps=eps, offset=offset, cast_before_scale=cast_before_scale), total


RESIDUAL_RMS_NORM = OpSpec(
    name="precast.residual_rms_norm",
    axes={"x": "... D", "residual": "... D", "weight": "D"},
    results={"y": "... D", "s": "... D"},
    dtypes={"x": FLOAT, "residual": FLOAT, "weight": FLOAT},
    reference=residual_rms_norm,
    tolerances=ELEMENTWISE,
)
