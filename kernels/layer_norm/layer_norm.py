"""layer_norm@1: y[t, d] = (x[t, d] - mean_d(x[t])) * rsqrt(var_d(x[t]) + eps) * weight[d] + bias[d].

The variance is that of the population (divided by D). Computed in float32, rounded once at the end.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from precast.kernels.dtypes import FLOAT, widened
from precast.kernels.spec import ELEMENTWISE, Draw, OpSpec, Sample


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


def _samples(draw: Draw) -> Iterator[Sample]:
    yield {"x": draw.normal(1, 5, 33), "weight": draw.normal(33), "bias": draw.normal(33), "eps": 1e-5}
    yield {"x": draw.normal(1, 1, 8), "weight": draw.normal(8), "bias": None, "eps": 1e-6}
    yield {"x": draw.normal(1, 7, 4, 12).transpose(1, 2), "weight": None, "bias": None, "eps": 1e-5}
    yield {"x": draw.normal(1, 0, 16), "weight": draw.normal(16), "bias": draw.normal(16), "eps": 1e-5}


LAYER_NORM = OpSpec(
    name="precast.layer_norm",
    axes={"x": "... D", "weight": "D", "bias": "D"},
    results={"y": "... D"},
    dtypes={"x": FLOAT, "weight": FLOAT, "bias": FLOAT},
    reference=layer_norm,
    samples=_samples,
    tolerances=ELEMENTWISE,
)
