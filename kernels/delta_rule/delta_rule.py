"""delta_rule@1: as `precast.kernels.delta_rule.stateful`, with states that begin at zero."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from precast.kernels.delta_rule import chunked
from precast.kernels.delta_rule.stateful import STATEFUL_DELTA_RULE, apply
from precast.kernels.dtypes import FLOAT
from precast.kernels.spec import PRODUCT, Draw, OpSpec, Sample
from precast.kernels.states import fresh, without_states


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor | None,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    scale: float,
    normalise: bool,
) -> torch.Tensor:
    """`q`, `k` [1, T, K, D], `v` [1, T, H, E], `cu_seqlens` [B + 1] int32; [1, T, H, E] in q's dtype.

    H is a multiple of K: value heads of one key head lie side by side. `decay` [1, T, H] or [1, T, H, D], the logarithm
    of the factor, at most 0; `beta` [1, T, H]. Computed in float32, rounded once.
    """
    held = fresh(cu_seqlens, (v.shape[2], q.shape[3], v.shape[3]), q)
    return apply(q, k, v, decay, beta, held, scale, normalise)


def _samples(draw: Draw) -> Iterator[Sample]:
    return map(without_states, STATEFUL_DELTA_RULE.samples(draw))


DELTA_RULE = OpSpec(
    name="precast.delta_rule",
    axes={"q": "1 T K D", "k": "1 T K D", "v": "1 T H E", "decay": "...", "beta": "1 T H", "cu_seqlens": "B+1"},
    results={"y": "1 T H E"},
    dtypes={"q": FLOAT, "k": FLOAT, "v": FLOAT, "decay": FLOAT, "beta": FLOAT, "cu_seqlens": (torch.int32,)},
    reference=delta_rule,
    samples=_samples,
    tolerances=PRODUCT,
    implementations={"cpu": lambda: chunked.delta_rule, "cuda": lambda: chunked.delta_rule},
    reads_metadata=True,
)
