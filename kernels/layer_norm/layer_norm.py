"""layer_norm@1: y[t, d] = (x[t, d] - mean_d(x[t])) * rsqrt(var_d(x[t]) + eps) * weight[d] + bias[d].

The variance is that of the population (divided by D). Computed in float32, rounded once at the end.
"""

from __future__ import annotations

import torch

from precast.kernels.dtypes import FLOAT, widened
from precast.kernels.spec import ELEMENTWISE, OpSpec


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, *, eps: float) -> torch.Tensor:
    """`x` [..., D] less its mean, over its deviation, times `weight` [D] plus `bias` [D]; shape and dtype of `x`."""
    wide = widened(x)
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(y.dtype)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.to(x.dtype).contiguous()


LAYER_NORM = OpSpec(
    name="precast.layer_norm",
    axes={"x": "... D", "weight": "D", "bias": "D"},
    results={"y": "... D"},
    dtypes={"x": FLOAT, "weight": FLOAT, "bias": FLOAT},
    reference=layer_norm,
    tolerances=ELEMENTWISE,
)
