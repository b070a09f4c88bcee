"""wkv@1: as `precast.kernels.wkv.stateful`, with states that begin at zero."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from precast.kernels.dtypes import FLOAT
from precast.kernels.spec import PRODUCT, Draw, OpSpec, Sample
from precast.kernels.states import fresh, without_states
from precast.kernels.wkv import doubled
from precast.kernels.wkv.stateful import STATEFUL_WKV, scan


def wkv(
    k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, first: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """`k`, `v` [1, T, C], `decay` (at most 0), `first` [C], `cu_seqlens` [B + 1] int32; [1, T, C] in v's dtype.

    Computed in float32, rounded once.
    """
    return scan(k, v, decay, first, fresh(cu_seqlens, (3, v.shape[2]), v))


def _samples(draw: Draw) -> Iterator[Sample]:
    return map(without_states, STATEFUL_WKV.samples(draw))


WKV = OpSpec(
    name="precast.wkv",
    axes={"k": "1 T C", "v": "1 T C", "decay": "C", "first": "C", "cu_seqlens": "B+1"},
    results={"y": "1 T C"},
    dtypes=dict.fromkeys(("k", "v", "decay", "first"), FLOAT) | {"cu_seqlens": (torch.int32,)},
    reference=wkv,
    samples=_samples,
    tolerances=PRODUCT,
    implementations={"cpu": lambda: doubled.wkv, "cuda": lambda: doubled.wkv},
    reads_metadata=True,
)
