"""gather_rows@1: y[0, r] = x[0, rows[r]]: what the LM head is computed for, and no more."""

from __future__ import annotations

import torch

from precast.kernels.dtypes import FLOAT
from precast.kernels.spec import OpSpec


def gather_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The rows of `x` [1, T, D] that `rows` [R] (int64) name, in their order; [1, R, D], new memory."""
    return x.index_select(1, rows)


GATHER_ROWS = OpSpec(
    name="precast.gather_rows",
    axes={"x": "1 T D", "rows": "R"},
    results={"y": "1 R D"},
    dtypes={"x": FLOAT, "rows": (torch.int64,)},
    reference=gather_rows,
)
