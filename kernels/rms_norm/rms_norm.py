"""rms_norm@1: n[t, d] = x[t, d] * rsqrt(mean_d(x[t, d]^2) + eps), computed in float32; then

- `cast_before_scale`: y = (offset + weight) * n, where n is first rounded to x's dtype (Llama);
- otherwise: y = (offset + weight) * n in float32, rounded once at the end (Gemma, with offset 1);
- without a weight: y = n.
"""

from __future__ import annotations

import torch

from precast.kernels.dtypes import FLOAT, widened
from precast.kernels.spec import ELEMENTWISE, OpSpec


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, *, eps: float, offset: float = 0.0, cast_before_scale: bool
) -> torch.Tensor:
    """`x` [..., D] over its root mean square, times `offset + weight` [D]; same shape and dtype as `x`, contiguous."""
    wide = widened(x)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype).contiguous()
    if cast_before_scale:
        return (_scale(weight, offset) * normed.to(x.dtype)).to(x.dtype).contiguous()
    return (_scale(weight.to(wide.dtype), offset) * normed).to(x.dtype).contiguous()


def _scale(weight: torch.Tensor, offset: float) -> torch.Tensor:
    return weight + offset if offset else weight


RMS_NORM = OpSpec(
    name="precast.rms_norm",
    axes={"x": "... D", "weight": "D"},
    results={"y": "... D"},
    dtypes={"x": FLOAT, "weight": FLOAT},
    reference=rms_norm,
    tolerances=ELEMENTWISE,
)
