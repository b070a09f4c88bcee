"""stateful_selective_scan@1, the scan of Mamba 1, for each channel:

    step[t] = act(dt[t] + dt_bias), where act is softplus if wanted
    h[t, n] = exp(a[n] * step[t]) * h[t - 1, n] + step[t] * x[t] * b[t, n]
    y[t] = sum_n h[t, n] * c[t, n] + d * x[t]

h [N] is the state; b and c are the same for all channels. Packed sequences and slots: `precast.kernels.states`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from precast.kernels.dtypes import FLOAT
from precast.kernels.selective_scan import blocked
from precast.kernels.spec import PRODUCT, Draw, OpSpec, Sample
from precast.kernels.state_space_scan.steps import steps
from precast.kernels.states import (
    METADATA,
    Slots,
    bounds_of,
    computed_in,
    one_by_one,
    sequence_samples,
    spoiled,
    state_sample,
)


def stateful_selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    state: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    softplus: bool,
) -> torch.Tensor:
    """`x`, `dt` [1, T, C], `a` (below 0) [C, N], `b`, `c` [1, T, N], `state` [P, C, N] float32; [1, T, C] in x's dtype.

    `d`, `dt_bias` [C]. Metadata is int32: `slots`, `kv_lens` [B], `cu_seqlens` [B + 1]. Computed in float32, rounded
    once.
    """
    dt = steps(dt, dt_bias, computed_in(x), softplus)
    return scan(x, dt, a, b, c, d, Slots(state, slots, cu_seqlens, kv_lens))


def scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    held: Slots,
) -> torch.Tensor:
    """The formula, token by token, for both forms; `dt` is the step itself."""

    def sequence(
        x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = []
        for t in range(len(x)):
            state = torch.exp(a.to(dt.dtype) * dt[t, :, None]) * state + (dt[t] * x[t])[:, None] * b[t]
            rows.append((state * c[t]).sum(-1))
        y = torch.stack(rows)
        return y if d is None else y + d * x, state

    return one_by_one(sequence, (x, dt, b, c), x.new_zeros(x.shape), held)


def _samples(draw: Draw) -> Iterator[Sample]:
    channels, width = 7, 5
    for i, (sequences, padding, nameless) in enumerate(sequence_samples()):
        end = bounds_of(sequences)[-1]
        tokens = end + padding
        yield {
            "x": spoiled(draw.normal(1, tokens, channels), end),
            "dt": spoiled(draw.normal(1, tokens, channels), end),
            "a": -draw.uniform(channels, width, low=0.1, high=(2.0, 40.0)[i % 2], dtype=torch.float32),
            "b": spoiled(draw.normal(1, tokens, width), end),
            "c": spoiled(draw.normal(1, tokens, width), end),
            "d": draw.normal(channels) if i % 3 else None,
            "dt_bias": draw.normal(channels) if i % 4 else None,
            **state_sample(draw, sequences, nameless, (channels, width), torch.float32),
            "softplus": True,
        }
    sequences = ((5, 9), (1, 1))
    fused = draw.uniform(1, 6, 16, high=0.5)
    yield {
        "x": fused[..., :4],
        "dt": fused[..., 4:8],
        "a": -draw.uniform(4, 4),
        "b": fused[..., 8:12],
        "c": fused[..., 12:],
        "d": draw.normal(4, dtype=torch.float32),
        "dt_bias": None,
        **state_sample(draw, sequences, (), (4, 4), torch.float32),
        "softplus": False,
    }


_FLOATING = ("x", "dt", "a", "b", "c", "d", "dt_bias")

STATEFUL_SELECTIVE_SCAN = OpSpec(
    name="precast.stateful_selective_scan",
    axes={
        "x": "1 T C",
        "dt": "1 T C",
        "a": "C N",
        "b": "1 T N",
        "c": "1 T N",
        "d": "C",
        "dt_bias": "C",
        "state": "P C N",
        "slots": "B",
        "cu_seqlens": "B+1",
        "kv_lens": "B",
    },
    results={"y": "1 T C"},
    dtypes=dict.fromkeys(_FLOATING, FLOAT) | {"state": (torch.float32,)} | dict.fromkeys(METADATA, (torch.int32,)),
    reference=stateful_selective_scan,
    samples=_samples,
    tolerances=PRODUCT,
    implementations={"cpu": lambda: blocked.stateful_selective_scan, "cuda": lambda: blocked.stateful_selective_scan},
    reads_metadata=True,
)
