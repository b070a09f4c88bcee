"""Experts in few bits, each dequantised when its tokens are multiplied; those that no token goes to aren't.

For CPUs, and for GPUs that have no kernel of the format. The numbers are those of `precast.kernels.experts.grouped` on
a CPU, over weights that were dequantised beforehand.
"""

from __future__ import annotations

from typing import Literal

import torch

from precast.ir.ops.rows_experts import TRANSPOSED
from precast.kernels.calls import implements
from precast.kernels.experts.experts import Between
from precast.kernels.experts.grouped import Products, one_by_one, weighted_sum
from precast.kernels.quantised_experts.quantised_experts import Stored


@implements("quantised_experts")
def quantised_experts(
    x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor, stored: Stored, between: Between
) -> torch.Tensor:
    """`precast.quantised_experts`. The host reads how many tokens each expert has."""
    num_experts = stored.up.shape[0]

    def products(name: Literal["up", "down"], size: int, bias: torch.Tensor | None) -> Products:
        return lambda rows, ids: one_by_one(
            rows, lambda expert: stored.matrix(name, expert, x.dtype), (num_experts, size), bias, ids
        )

    opened = stored.up_scales.shape[2] if stored.format in TRANSPOSED else stored.up.shape[1]
    up, down = products("up", opened, stored.up_bias), products("down", x.shape[1], stored.down_bias)
    return weighted_sum(x, expert_ids, expert_weights, num_experts, up, down, between)
