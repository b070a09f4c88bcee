"""rms_norm@1: n[t, d] = x[t, d] * rsqrt(mean_d(x[t, d]^2) + eps), computed in float32; then

- `cast_before_scale`: y = (offset + weight) * n, where n is first rounded to x's dtype (Llama);
- otherwise: y = (offset + weight) * n in float32, rounded once at the end (Gemma, with offset 1);
- without a weight: y = n.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from precast.kernels.dtypes import FLOAT, widened
from precast.kernels.spec import ELEMENTWISE, Draw, OpSpec, Sample


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


def _samples(draw: Draw) -> Iterator[Sample]:
    for tokens, size in ((1, 8), (5, 33), (0, 16)):
        for offset, cast_before_scale in ((0.0, True), (1.0, False)):
            yield {
                "x": draw.normal(1, tokens, size),
                "weight": draw.normal(size),
                "eps": 1e-6,
                "offset": offset,
                "cast_before_scale": cast_before_scale,
            }
    # A head's norm, on a slice of the fused query, key and value.
    heads = draw.normal(1, 3, 5, 12)[:, :, 1:4]
    yield {"x": heads, "weight": draw.normal(12), "eps": 1e-5, "cast_before_scale": True}
    yield {"x": heads.transpose(1, 2), "weight": None, "eps": 1e-5, "cast_before_scale": False}


RMS_NORM = OpSpec(
    name="precast.rms_norm",
    axes={"x": "... D", "weight": "D"},
    results={"y": "... D"},
    dtypes={"x": FLOAT, "weight": FLOAT},
    reference=rms_norm,
    samples=_samples,
    tolerances=ELEMENTWISE,
)
