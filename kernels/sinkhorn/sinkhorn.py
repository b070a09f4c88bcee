"""sinkhorn@1: matrices [N, N], each flat in the last dimension, divided by turns by the sums of their columns and rows.

    y = x / (sum_i x[i, j] + eps)
    then, `iterations - 1` times:    y = y / (sum_j y[i, j] + eps)    y = y / (sum_i y[i, j] + eps)

It is the projection of DeepSeek-V4's hyper-connections to doubly stochastic matrices, by Sinkhorn and Knopp.
"""

from __future__ import annotations

import torch

from precast.kernels.dtypes import FLOAT, widened
from precast.kernels.spec import PRODUCT, OpSpec


def sinkhorn(x: torch.Tensor, *, size: int, iterations: int, eps: float) -> torch.Tensor:
    """`x` [..., N * N], `size` N; [..., N * N] in x's dtype. Computed in float32, rounded once."""
    y = widened(x).unflatten(-1, (size, size))
    y = y / (y.sum(dim=-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        y = y / (y.sum(dim=-1, keepdim=True) + eps)
        y = y / (y.sum(dim=-2, keepdim=True) + eps)
    return y.flatten(-2).to(x.dtype)


SINKHORN = OpSpec(
    name="precast.sinkhorn",
    axes={"x": "... N"},
    results={"y": "... N"},
    dtypes={"x": FLOAT},
    reference=sinkhorn,
    tolerances=PRODUCT,
)
