"""embedding@1: y[..., d] = weight[ids[...], d] * scale, where scale is first rounded to weight's dtype.

The rounding is part of the definition: Gemma's checkpoints were trained with a scale of sqrt(D) in bfloat16.
"""

from __future__ import annotations

import torch

from precast.kernels.dtypes import FLOAT
from precast.kernels.spec import ELEMENTWISE, OpSpec


def embedding(ids: torch.Tensor, weight: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    """The rows of `weight` [V, D] that `ids` [...] (int64 or int32) name, times `scale`; [..., D] in weight's dtype.

    Rows may be of int64, which are taken as they are: the experts of a token, in layers that route by it.

    An id outside of `0..V-1` raises IndexError on a CPU and stops the program on a GPU.
    """
    return scaled(torch.nn.functional.embedding(ids, weight), scale)


def scaled(rows: torch.Tensor, scale: float) -> torch.Tensor:
    """`rows` times `scale`, which is first rounded to their dtype; themselves where it is 1."""
    if scale == 1.0:
        return rows
    # Rounded on the host: a tensor on the device would be one more copy a call.
    return rows * torch.tensor(scale, dtype=rows.dtype).item()


EMBEDDING = OpSpec(
    name="precast.embedding",
    axes={"ids": "...", "weight": "V D"},
    results={"y": "... D"},
    dtypes={"ids": (torch.int64, torch.int32), "weight": (*FLOAT, torch.int64)},
    reference=embedding,
    tolerances=ELEMENTWISE,
)
