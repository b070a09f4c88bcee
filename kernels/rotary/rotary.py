"""rotary@1: the first 2R elements of each head, taken as R pairs (a, b), are turned by the token's angles:

    (a[r], b[r]) -> (a[r] * cos[t, r] - b[r] * sin[t, r], b[r] * cos[t, r] + a[r] * sin[t, r])

Pairs are x[r], x[R + r] (halves), or x[2r], x[2r + 1] (interleaved). The rest of the head passes through. Computed in
float32, rounded once at the end.
"""

from __future__ import annotations

import torch

from precast.kernels.dtypes import FLOAT, widened
from precast.kernels.spec import ELEMENTWISE, OpSpec


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """`x` [1, T, H, D] turned by the tables `cos`, `sin` [1, T, R], 2R <= D; same shape and dtype, new memory."""
    pairs = cos.shape[-1]
    turned = widened(x[..., : 2 * pairs])
    cos, sin = cos[:, :, None].to(turned.dtype), sin[:, :, None].to(turned.dtype)
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = turned[..., :pairs], turned[..., pairs:]
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * pairs :]), dim=-1)


ROTARY = OpSpec(
    name="precast.rotary",
    axes={"x": "1 T H D", "cos": "1 T R", "sin": "1 T R"},
    results={"y": "1 T H D"},
    dtypes={"x": FLOAT, "cos": FLOAT, "sin": FLOAT},
    reference=rotary,
    tolerances=ELEMENTWISE,
)
