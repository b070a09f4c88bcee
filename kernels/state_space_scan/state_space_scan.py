"""state_space_scan@1: as `precast.kernels.state_space_scan.stateful`, with states that begin at zero."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from precast.kernels.dtypes import FLOAT
from precast.kernels.spec import PRODUCT, Draw, OpSpec, Sample
from precast.kernels.state_space_scan import chunked
from precast.kernels.state_space_scan.stateful import STATEFUL_STATE_SPACE_SCAN, scan
from precast.kernels.state_space_scan.steps import steps
from precast.kernels.states import computed_in, fresh, without_states


def state_space_scan(
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
    dt_min: float,
    dt_max: float,
) -> torch.Tensor:
    """`x` [1, T, H, D], `dt` [1, T, H], `b`, `c` [1, T, G, N], `cu_seqlens` [B + 1] int32; [1, T, H, D] in x's dtype.

    `a` (below 0), `d`, `dt_bias` [H]; H is a multiple of G: heads of one group lie side by side. Computed in float32,
    rounded once.
    """
    dt = steps(dt, dt_bias, computed_in(x), softplus, dt_min, dt_max)
    return scan(x, dt, a, b, c, d, fresh(cu_seqlens, (*x.shape[2:], b.shape[3]), x))


def _samples(draw: Draw) -> Iterator[Sample]:
    return map(without_states, STATEFUL_STATE_SPACE_SCAN.samples(draw))


_FLOATING = ("x", "dt", "a", "b", "c", "d", "dt_bias")

STATE_SPACE_SCAN = OpSpec(
    name="precast.state_space_scan",
    axes={
        "x": "1 T H D",
        "dt": "1 T H",
        "a": "H",
        "b": "1 T G N",
        "c": "1 T G N",
        "d": "H",
        "dt_bias": "H",
        "cu_seqlens": "B+1",
    },
    results={"y": "1 T H D"},
    dtypes=dict.fromkeys(_FLOATING, FLOAT) | {"cu_seqlens": (torch.int32,)},
    reference=state_space_scan,
    samples=_samples,
    tolerances=PRODUCT,
    implementations={"cpu": lambda: chunked.state_space_scan, "cuda": lambda: chunked.state_space_scan},
    reads_metadata=True,
)
