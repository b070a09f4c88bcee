"""gated_linear@1: y[..., f] = act(p[..., f]) * p[..., F + f], p[..., n] = sum_k x[..., k] * w[n, k] + b[n].

It is `gated_activation` of a linear layer: the gate is the first half of its outputs, the values the second. The
product is rounded to x's dtype; what comes after is computed in float32 and rounded once at the end.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from precast.kernels.dtypes import FLOAT
from precast.kernels.gated_activation.gated_activation import gated_activation
from precast.kernels.spec import PRODUCT, OpSpec


def gated_linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, kind: str
) -> torch.Tensor:
    """The gated product of `input` [..., I] with `weight` [2F, I], plus `bias` [2F]; [..., F] in `input`'s dtype.

    `kind` names the activation. Raises ValueError for one that isn't silu, gelu, gelu_tanh.
    """
    return gated_activation(functional.linear(input, weight, bias), kind=kind)


GATED_LINEAR = OpSpec(
    name="precast.gated_linear",
    axes={"input": "... I", "weight": "2F I", "bias": "2F"},
    results={"y": "... F"},
    dtypes={"input": FLOAT, "weight": FLOAT, "bias": FLOAT},
    reference=gated_linear,
    tolerances=PRODUCT,
)
