"""norm_residual_norm@1: s = residual + rms_norm(x, inner_weight); y = rms_norm(s, weight); returns (y, s).

Both norms have one `eps`, `offset` and `cast_before_scale`. What they return, and the sum, are rounded to x's dtype.
"""

from __future__ import annotations

import torch

from precast.kernels.dtypes import FLOAT
from precast.kernels.rms_norm.residual_rms_norm import residual_rms_norm
from precast.kernels.rms_norm.rms_norm import rms_norm
from precast.kernels.spec import TWICE, OpSpec


def norm_residual_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    inner_weight: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    cast_before_scale: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of `x` [..., D] added to `residual`, that normed, and the sum; of `x`'s shape and dtype, contiguous."""
    normed = rms_norm(x, inner_weight, eps=eps, offset=offset, cast_before_scale=cast_before_scale)
    return residual_rms_norm(normed, residual, weight, eps=eps, offset=offset, cast_before_scale=cast_before_scale)


NORM_RESIDUAL_NORM = OpSpec(
    name="precast.norm_residual_norm",
    axes={"x": "... D", "residual": "... D", "inner_weight": "D", "weight": "D"},
    results={"y": "... D", "s": "... D"},
    dtypes={"x": FLOAT, "residual": FLOAT, "inner_weight": FLOAT, "weight": FLOAT},
    reference=norm_residual_norm,
    # Two norms, each of which is rounded: what the first rounds the other way, the second has besides.
    tolerances=TWICE,
)
