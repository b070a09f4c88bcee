"""grouped_linear@1: y[n, o] = sum_i x[n, i] * weight[expert_ids[n], o, i] + bias[expert_ids[n], o].

A row whose id is no expert's gives zeros. Computed in float32 (float64 for float64), rounded once at the end.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from precast.kernels.dtypes import FLOAT, widened
from precast.kernels.spec import PRODUCT, OpSpec


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, expert_ids: torch.Tensor
) -> torch.Tensor:
    """Each row of `x` [N, I] times the weight of its expert: [N, O] in `x`'s dtype.

    `weight` [E, O, I] and `bias` [E, O] have `x`'s dtype; `expert_ids` [N] is int64.
    """
    out = x.new_zeros((x.shape[0], weight.shape[1]))
    for expert in range(weight.shape[0]):
        rows = expert_ids == expert
        expert_bias = None if bias is None else widened(bias[expert])
        out[rows] = functional.linear(widened(x[rows]), widened(weight[expert]), expert_bias).to(x.dtype)
    return out


GROUPED_LINEAR = OpSpec(
    name="precast.grouped_linear",
    axes={"x": "N I", "weight": "E O I", "bias": "E O", "expert_ids": "N"},
    results={"y": "N O"},
    dtypes={"x": FLOAT, "weight": FLOAT, "bias": FLOAT, "expert_ids": (torch.int64,)},
    reference=grouped_linear,
    tolerances=PRODUCT,
)
