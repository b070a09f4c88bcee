"""linear_attention@1: as `precast.kernels.linear_attention.stateful`, with states that begin at zero."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from precast.kernels.dtypes import FLOAT
from precast.kernels.linear_attention import chunked
from precast.kernels.linear_attention.stateful import STATEFUL_LINEAR_ATTENTION, attend
from precast.kernels.spec import PRODUCT, Draw, OpSpec, Sample
from precast.kernels.states import fresh, without_states


def linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """`q`, `k` [1, T, H, D], `v` [1, T, H, E], `cu_seqlens` [B + 1] int32; [1, T, H, E] in q's dtype.

    `decay` [H], [1, T, H] or [1, T, H, D], the logarithm of the factor, at most 0. Computed in float32, rounded once.
    """
    return attend(q, k, v, decay, fresh(cu_seqlens, (*v.shape[2:3], q.shape[3], v.shape[3]), q), scale)


def _samples(draw: Draw) -> Iterator[Sample]:
    return map(without_states, STATEFUL_LINEAR_ATTENTION.samples(draw))


LINEAR_ATTENTION = OpSpec(
    name="precast.linear_attention",
    axes={"q": "1 T H D", "k": "1 T H D", "v": "1 T H E", "decay": "...", "cu_seqlens": "B+1"},
    results={"y": "1 T H E"},
    dtypes={"q": FLOAT, "k": FLOAT, "v": FLOAT, "decay": FLOAT, "cu_seqlens": (torch.int32,)},
    reference=linear_attention,
    samples=_samples,
    tolerances=PRODUCT,
    implementations={"cpu": lambda: chunked.linear_attention, "cuda": lambda: chunked.linear_attention},
    reads_metadata=True,
)
