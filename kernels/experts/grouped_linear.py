"""grouped_linear@1: y[n, o] = sum_i x[n, i] * weight[expert_ids[n], o, i] + bias[expert_ids[n], o].

A row whose id is no expert's gives zeros. Computed in float32 (float64 for float64), rounded once at the end.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from precast.kernels.dtypes import FLOAT, widened
from precast.kernels.spec import PRODUCT, Draw, OpSpec, Sample


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


def _samples(draw: Draw) -> Iterator[Sample]:
    weight, bias = draw.normal(5, 7, 9, scale=0.3), draw.normal(5, 7)
    for count in (13, 1, 0):
        yield {
            "x": draw.normal(count, 9), "weight": weight, "bias": bias if count == 13 else None,
            "expert_ids": draw.integers(0, 5, count),
        }  # fmt: skip
    # sizes that a grouped product of whole vectors takes, and ids that are no expert's
    yield {
        "x": draw.normal(40, 32), "weight": draw.normal(3, 48, 32, scale=0.2), "bias": draw.normal(3, 48),
        "expert_ids": draw.integers(-1, 5, 40),
    }  # fmt: skip
    yield {
        "x": draw.normal(12, 32)[::2], "weight": draw.normal(4, 32, 16, scale=0.2).transpose(1, 2), "bias": None,
        "expert_ids": draw.integers(1, 3, 12)[::2],
    }  # fmt: skip


GROUPED_LINEAR = OpSpec(
    name="precast.grouped_linear",
    axes={"x": "N I", "weight": "E O I", "bias": "E O", "expert_ids": "N"},
    results={"y": "N O"},
    dtypes={"x": FLOAT, "weight": FLOAT, "bias": FLOAT, "expert_ids": (torch.int64,)},
    reference=grouped_linear,
    samples=_samples,
    tolerances=PRODUCT,
)
