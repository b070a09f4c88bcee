"""selective_scan@1: as `precast.kernels.selective_scan.stateful`, with states that begin at zero."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from precast.kernels.dtypes import FLOAT
from precast.kernels.selective_scan import blocked
from precast.kernels.selective_scan.stateful import STATEFUL_SELECTIVE_SCAN, scan
from precast.kernels.spec import PRODUCT, Draw, OpSpec, Sample
from precast.kernels.state_space_scan.steps import steps
from precast.kernels.states import computed_in, fresh, without_states


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    *,
    softplus: bool,
) -> torch.Tensor:
    """`x`, `dt` [1, T, C], `a` (below 0) [C, N], `b`, `c` [1, T, N], `d`, `dt_bias` [C]; [1, T, C] in x's dtype.

    `cu_seqlens` [B + 1] int32. Computed in float32, rounded once.
    """
    dt = steps(dt, dt_bias, computed_in(x), softplus)
    return scan(x, dt, a, b, c, d, fresh(cu_seqlens, a.shape, x))


def _samples(draw: Draw) -> Iterator[Sample]:
    return map(without_states, STATEFUL_SELECTIVE_SCAN.samples(draw))


_FLOATING = ("x", "dt", "a", "b", "c", "d", "dt_bias")

SELECTIVE_SCAN = OpSpec(
    name="precast.selective_scan",
    axes={
        "x": "1 T C",
        "dt": "1 T C",
        "a": "C N",
        "b": "1 T N",
        "c": "1 T N",
        "d": "C",
        "dt_bias": "C",
        "cu_seqlens": "B+1",
    },
    results={"y": "1 T C"},
    dtypes=dict.fromkeys(_FLOATING, FLOAT) | {"cu_seqlens": (torch.int32,)},
    reference=selective_scan,
    samples=_samples,
    tolerances=PRODUCT,
    implementations={"cpu": lambda: blocked.selective_scan, "cuda": lambda: blocked.selective_scan},
    reads_metadata=True,
)
