"""stateful_state_space_scan@1, the scan of Mamba 2, for each head, with the b and c of its group:

    step[t] = clamp(act(dt[t] + dt_bias), dt_min, dt_max), where act is softplus if wanted
    h[t] = exp(a * step[t]) * h[t - 1] + step[t] * x[t] b[t]^T        y[t] = h[t] c[t] + d * x[t]

h [D, N] is the state. Packed sequences and slots: `precast.kernels.states`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from precast.kernels.dtypes import FLOAT
from precast.kernels.spec import PRODUCT, Draw, OpSpec, Sample
from precast.kernels.state_space_scan import chunked
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


def stateful_state_space_scan(
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
    dt_min: float,
    dt_max: float,
) -> torch.Tensor:
    """`x` [1, T, H, D], `dt` [1, T, H], `b`, `c` [1, T, G, N], `state` [P, H, D, N] float32; [1, T, H, D] in x's dtype.

    `a` (below 0), `d`, `dt_bias` [H]; H is a multiple of G: heads of one group lie side by side. Metadata is int32:
    `slots`, `kv_lens` [B], `cu_seqlens` [B + 1]. Computed in float32, rounded once.
    """
    dt = steps(dt, dt_bias, computed_in(x), softplus, dt_min, dt_max)
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
    heads, groups = x.shape[2], b.shape[2]

    def sequence(
        x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        b, c = (z.repeat_interleave(heads // groups, dim=1) for z in (b, c))
        rows = []
        for t in range(len(x)):
            kept = torch.exp(a.to(dt.dtype) * dt[t])[:, None, None] * state
            state = kept + (dt[t, :, None] * x[t])[:, :, None] * b[t, :, None, :]
            rows.append((state * c[t, :, None, :]).sum(-1))
        y = torch.stack(rows)
        return y if d is None else y + d[:, None] * x, state

    return one_by_one(sequence, (x, dt, b, c), x.new_zeros(x.shape), held)


def _samples(draw: Draw) -> Iterator[Sample]:
    size, width = 5, 6
    for i, (sequences, padding, nameless) in enumerate(sequence_samples()):
        heads, groups = ((4, 2), (3, 3), (3, 1))[i % 3]
        end = bounds_of(sequences)[-1]
        tokens = end + padding
        yield {
            "x": spoiled(draw.normal(1, tokens, heads, size), end),
            "dt": spoiled(draw.normal(1, tokens, heads), end),
            "a": -draw.uniform(heads, low=0.1, high=(2.0, 40.0)[i % 2], dtype=torch.float32),
            "b": spoiled(draw.normal(1, tokens, groups, width), end),
            "c": spoiled(draw.normal(1, tokens, groups, width), end),
            "d": draw.normal(heads) if i % 3 else None,
            "dt_bias": draw.normal(heads) if i % 4 else None,
            **state_sample(draw, sequences, nameless, (heads, size, width), torch.float32),
            "softplus": True,
            "dt_min": 0.0,
            "dt_max": float("inf") if i % 2 else 0.7,
        }
    sequences = ((5, 9), (1, 1))
    fused = draw.uniform(1, 6, 2, 13, high=0.5)
    yield {
        "x": fused[..., :4],
        "dt": fused[..., 12],
        "a": -draw.uniform(2),
        "b": fused[..., 4:8],
        "c": fused[..., 8:12],
        "d": draw.normal(2, dtype=torch.float32),
        "dt_bias": None,
        **state_sample(draw, sequences, (), (2, 4, 4), torch.float32),
        "softplus": False,
        "dt_min": 0.1,
        "dt_max": 100.0,
    }


_FLOATING = ("x", "dt", "a", "b", "c", "d", "dt_bias")

STATEFUL_STATE_SPACE_SCAN = OpSpec(
    name="precast.stateful_state_space_scan",
    axes={
        "x": "1 T H D",
        "dt": "1 T H",
        "a": "H",
        "b": "1 T G N",
        "c": "1 T G N",
        "d": "H",
        "dt_bias": "H",
        "state": "P H D N",
        "slots": "B",
        "cu_seqlens": "B+1",
        "kv_lens": "B",
    },
    results={"y": "1 T H D"},
    dtypes=dict.fromkeys(_FLOATING, FLOAT) | {"state": (torch.float32,)} | dict.fromkeys(METADATA, (torch.int32,)),
    reference=stateful_state_space_scan,
    samples=_samples,
    tolerances=PRODUCT,
    implementations={
        "cpu": lambda: chunked.stateful_state_space_scan,
        "cuda": lambda: chunked.stateful_state_space_scan,
    },
    reads_metadata=True,
)
