"""Experts in few bits, each dequantised when its tokens are multiplied; those that no token goes to aren't.

For CPUs, and for GPUs that have no kernel of the format. The numbers are those of `precast.kernels.experts.grouped` on
a CPU, over weights that were dequantised beforehand.
"""

from __future__ import annotations

from typing import Literal

import torch

from precast.kernels.calls import implements
from precast.kernels.dtypes import widened
from precast.kernels.experts.experts import Between
from precast.kernels.experts.grouped import Products, one_by_one, weighted_sum
from precast.kernels.quantised_experts.quantised_experts import Stored
from precast.kernels.quantised_linear.quantised_linear import quantise_input


@implements("quantised_experts")
def quantised_experts(
    x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor, stored: Stored, between: Between,
    rounding: str,
) -> torch.Tensor:  # fmt: skip
    """`precast.quantised_experts`. The host reads how many tokens each expert has."""
    num_experts = stored.up.shape[0]

    def products(name: Literal["up", "down"], size: int, bias: torch.Tensor | None) -> Products:
        def product(rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            added = bias
            if rounding != "none":
                rows, added = quantise_input(widened(rows), rounding), None if bias is None else widened(bias)
            return one_by_one(
                rows, lambda expert: stored.matrix(name, expert, rows.dtype), (num_experts, size), added, ids
            )

        return product

    up = products("up", stored.up.shape[1], stored.up_bias)
    down = products("down", x.shape[1], stored.down_bias)
    return weighted_sum(x, expert_ids, expert_weights, num_experts, up, down, between)
