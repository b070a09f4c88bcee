"""gather_rows@1: y[0, r] = x[0, rows[r]]: what the LM head is computed for, and no more."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from precast.kernels.dtypes import FLOAT
from precast.kernels.spec import Draw, OpSpec, Sample


def gather_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The rows of `x` [1, T, D] that `rows` [R] (int64) name, in their order; [1, R, D], new memory."""
    return x.index_select(1, rows)


def _samples(draw: Draw) -> Iterator[Sample]:
    yield {"x": draw.normal(1, 7, 33), "rows": draw.of([6, 0, 3, 3], torch.int64)}
    yield {"x": draw.normal(1, 1, 8), "rows": draw.of([0], torch.int64)}
    yield {"x": draw.normal(1, 4, 16)[..., :5], "rows": draw.of([], torch.int64)}


GATHER_ROWS = OpSpec(
    name="precast.gather_rows",
    axes={"x": "1 T D", "rows": "R"},
    results={"y": "1 R D"},
    dtypes={"x": FLOAT, "rows": (torch.int64,)},
    reference=gather_rows,
    samples=_samples,
)
