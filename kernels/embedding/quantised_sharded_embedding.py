"""quantised_sharded_embedding@1: y[..., d] = w[ids[...] - start, d] * scale, and 0 where that is no row of w.

The table is one rank's part of the vocabulary, as in `sharded_embedding`: rows `start .. start + V`; its values are
those of `quantised_embedding`. Its scales are the rank's, too: the first is that of its first row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from precast.kernels.embedding.quantised_embedding import SCALES, STORED, quantised_embedding
from precast.kernels.embedding.sharded_embedding import of_part
from precast.kernels.spec import ELEMENTWISE, OpSpec


def quantised_sharded_embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    *,
    start: int,
    format: str,
    block: Sequence[int],
    dtype: torch.dtype,
    scale: float = 1.0,
) -> torch.Tensor:
    """The rows of `weight` [V, D] for the `ids` [...] (int64 or int32) from `start` to `start + V - 1`, dequantised,
    times `scale`; zeros for all others. [..., D] in `dtype`. `block` are the rows and columns that share one of the
    `scales`."""
    return of_part(
        ids - start, weight, dtype,
        lambda places: quantised_embedding(
            places, weight, scales, format=format, block=block, dtype=dtype, scale=scale
        ),
    )  # fmt: skip


QUANTISED_SHARDED_EMBEDDING = OpSpec(
    name="precast.quantised_sharded_embedding",
    axes={"ids": "...", "weight": "V D", "scales": "*"},
    results={"y": "... D"},
    dtypes={"ids": (torch.int64, torch.int32), "weight": STORED, "scales": SCALES},
    reference=quantised_sharded_embedding,
    tolerances=ELEMENTWISE,
)
