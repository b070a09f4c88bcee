"""linear_recurrence@1: as `precast.kernels.linear_recurrence.stateful`, with states that begin at zero."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from precast.kernels.dtypes import FLOAT
from precast.kernels.linear_recurrence import doubled
from precast.kernels.linear_recurrence.stateful import STATEFUL_LINEAR_RECURRENCE, scan
from precast.kernels.spec import PRODUCT, Draw, OpSpec, Sample
from precast.kernels.states import fresh, without_states


def linear_recurrence(
    x: torch.Tensor, factor: torch.Tensor, cu_seqlens: torch.Tensor, *, kind: str = "sum"
) -> torch.Tensor:
    """`x`, `factor` (from 0 to 1) [1, T, C], `cu_seqlens` [B + 1] int32; [1, T, C] in x's dtype.

    Computed in float32, rounded once. Raises ValueError for a kind that isn't sum or max.
    """
    return scan(x, factor, fresh(cu_seqlens, x.shape[2:], x), kind)


def _samples(draw: Draw) -> Iterator[Sample]:
    return map(without_states, STATEFUL_LINEAR_RECURRENCE.samples(draw))


LINEAR_RECURRENCE = OpSpec(
    name="precast.linear_recurrence",
    axes={"x": "1 T C", "factor": "1 T C", "cu_seqlens": "B+1"},
    results={"y": "1 T C"},
    dtypes={"x": FLOAT, "factor": FLOAT, "cu_seqlens": (torch.int32,)},
    reference=linear_recurrence,
    samples=_samples,
    tolerances=PRODUCT,
    implementations={"cpu": lambda: doubled.linear_recurrence, "cuda": lambda: doubled.linear_recurrence},
    reads_metadata=True,
)
