"""sharded_embedding@1: y[..., d] = weight[ids[...] - start, d] * scale, and 0 where that is no row of weight.

The table is one rank's part of the vocabulary: its rows `start .. start + V`. Summed over all ranks, each token has its
row once. The scale is rounded to weight's dtype, as in `embedding`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from precast.kernels.dtypes import FLOAT
from precast.kernels.embedding.embedding import embedding
from precast.kernels.spec import ELEMENTWISE, OpSpec


def sharded_embedding(ids: torch.Tensor, weight: torch.Tensor, *, start: int, scale: float = 1.0) -> torch.Tensor:
    """The rows of `weight` [V, D] for the `ids` [...] (int64 or int32) from `start` to `start + V - 1`, times `scale`;
    zeros for all others. [..., D] in weight's dtype."""
    return of_part(ids - start, weight, weight.dtype, lambda places: embedding(places, weight, scale=scale))


def of_part(
    places: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, look_up: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """What `look_up` makes of `places` [...] that are rows of `weight` [V, D], and zeros for all others; [..., D] in
    `dtype`."""
    if weight.shape[0] == 0:
        return weight.new_zeros(*places.shape, weight.shape[1], dtype=dtype)
    inside = (places >= 0) & (places < weight.shape[0])
    rows = look_up(places.clamp(0, weight.shape[0] - 1))
    return torch.where(inside[..., None], rows, torch.zeros((), dtype=rows.dtype, device=rows.device))


SHARDED_EMBEDDING = OpSpec(
    name="precast.sharded_embedding",
    axes={"ids": "...", "weight": "V D"},
    results={"y": "... D"},
    dtypes={"ids": (torch.int64, torch.int32), "weight": FLOAT},
    reference=sharded_embedding,
    tolerances=ELEMENTWISE,
)
