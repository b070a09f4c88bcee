"""Rows sorted by their expert, and one product for each expert that has rows.

On the CPU the groups' sizes are read and the products done one after the other, on the experts' weights where they
lie: with few rows, few experts are touched. On a GPU `grouped_mm` takes the groups' ends from device memory, and reads
nothing back on compute capability 9 and 10; where it doesn't take the weights (its rows must be 16 byte vectors of
bfloat16), each row's weight is gathered, some rows at a time. Where both can be had, gathering never wins: on an H200,
in bfloat16, it took from 1.0 (one token, 128 small experts) to 23 times (16 tokens, 8 large ones) as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from precast.kernels.calls import implements
from precast.kernels.dtypes import widened
from precast.kernels.experts.experts import Between, Layers, activate
from precast.kernels.experts.limits import GATHERED_ELEMENTS, VECTOR


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, expert_ids: torch.Tensor
) -> torch.Tensor:
    """`precast.grouped_linear`."""
    ids, order = _sorted(expert_ids, weight.shape[0])
    out = _products(x[order], weight, bias, ids)
    return torch.empty_like(out).index_copy_(0, order, out)


@implements("experts")
def experts(
    x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor, layers: Layers, between: Between
) -> torch.Tensor:
    """`precast.experts`."""
    up, down, up_bias, down_bias = layers
    return weighted_sum(
        x, expert_ids, expert_weights, up.shape[0], lambda rows, ids: _products(rows, up, up_bias, ids),
        lambda rows, ids: _products(rows, down, down_bias, ids), between,
    )  # fmt: skip


Products = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Of rows [N, I], sorted by their experts' ids [N], the products with their weights: [N, O]; of no expert, zeros."""


def weighted_sum(
    x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor, num_experts: int, up: Products,
    down: Products, between: Between,
) -> torch.Tensor:  # fmt: skip
    """`precast.experts`, by what makes its two products."""
    tokens, top_k = expert_ids.shape
    ids, order = _sorted(expert_ids.reshape(-1), num_experts)
    h = up(x[order // top_k], ids)
    h = activate(widened(h), between)
    h = down(h.to(x.dtype), ids)
    rows = torch.empty_like(h).index_copy_(0, order, h).reshape(tokens, top_k, x.shape[1])
    is_expert = (expert_ids >= 0) & (expert_ids < num_experts)
    weights = widened(expert_weights).masked_fill(~is_expert, 0.0)
    return (widened(rows) * weights[:, :, None]).sum(dim=1).to(x.dtype)


def _sorted(expert_ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids in order and where each stood; those that are no expert's become `num_experts`, and so come last."""
    is_expert = (expert_ids >= 0) & (expert_ids < num_experts)
    ids, order = expert_ids.masked_fill(~is_expert, num_experts).sort(stable=True)
    return ids, order


def _products(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor) -> torch.Tensor:
    """Each row of `x` [N, I], sorted by `ids`, times its expert's `weight` [E, O, I]; zeros where the id is E."""
    if x.device.type == "cpu":
        return one_by_one(x, lambda expert: weight[expert], weight.shape[:2], bias, ids)
    num_experts = weight.shape[0]
    known = ids.clamp(max=num_experts - 1)
    if _takes(x, weight):
        ends = torch.searchsorted(ids, torch.arange(num_experts, device=ids.device), right=True)
        out = functional.grouped_mm(x, weight.transpose(1, 2), offs=ends.to(torch.int32))
    else:
        out = _gathered(x, weight, known)
    if bias is not None:
        out = out + bias[known]
    return out.masked_fill((ids == num_experts)[:, None], 0.0)


def one_by_one(
    x: torch.Tensor, weight_of: Callable[[int], torch.Tensor], shape: Sequence[int], bias: torch.Tensor | None,
    ids: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """As `Products`, each expert's in turn: `weight_of` it is [O, I]. `shape`: how many experts there are, and O.

    The groups' sizes are read by the host.
    """
    num_experts, size = shape
    out = x.new_zeros((x.shape[0], size))
    groups, counts = torch.unique_consecutive(ids, return_counts=True)
    start = 0
    for expert, count in zip(groups.tolist(), counts.tolist(), strict=True):
        end = start + count
        if expert < num_experts:
            expert_bias = None if bias is None else bias[expert]
            out[start:end] = functional.linear(x[start:end], weight_of(expert), expert_bias)
        start = end
    return out


def _takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `grouped_mm` takes these, without a way around it that waits for the device."""
    whole_vectors = x.shape[1] % VECTOR == 0 and weight.shape[1] % VECTOR == 0
    return x.dtype == torch.bfloat16 and whole_vectors and weight.is_contiguous() and x.shape[0] > 0


def _gathered(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    out = x.new_empty((x.shape[0], weight.shape[1]))
    rows = max(1, GATHERED_ELEMENTS // max(1, weight[0].numel()))
    for start in range(0, x.shape[0], rows):
        part = slice(start, start + rows)
        out[part] = torch.bmm(weight[ids[part]], x[part, :, None])[:, :, 0]
    return out
