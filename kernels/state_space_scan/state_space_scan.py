"""state_space_scan@1 and stateful_state_space_scan@1, the scan of Mamba 2, for each head, with its group's b and c:

    step[t] = clamp(act(dt[t] + dt_bias), dt_min, dt_max), where act is softplus if wanted
    h[t] = exp(a * step[t]) * h[t - 1] + step[t] * x[t] b[t]^T        y[t] = h[t] c[t] + d * x[t]

h [D, N] is the state. Packed sequences and slots: `precast.kernels.states`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from precast.kernels.forms import form_specs, forms
from precast.kernels.spec import Draw, Sample
from precast.kernels.state_space_scan.steps import steps
from precast.kernels.states import Slots, bounds_of, computed_in, one_by_one, sequence_samples, spoiled, state_sample


def _scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    held: Slots,
    softplus: bool,
    dt_min: float,
    dt_max: float,
) -> torch.Tensor:
    """`x` [1, T, H, D], `dt` [1, T, H], `b`, `c` [1, T, G, N], state [H, D, N] float32; [1, T, H, D] in x's dtype.

    `a` (below 0), `d`, `dt_bias` [H]; H is a multiple of G: heads of one group lie side by side. Computed in float32,
    rounded once.
    """
    size = steps(dt, dt_bias, computed_in(x), softplus, dt_min, dt_max)
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

    return one_by_one(sequence, (x, size, b, c), x.new_zeros(x.shape), held)


state_space_scan, stateful_state_space_scan = forms("state_space_scan", _scan)


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


STATE_SPACE_SCAN, STATEFUL_STATE_SPACE_SCAN = form_specs(
    "state_space_scan",
    axes={"x": "1 T H D", "dt": "1 T H", "a": "H", "b": "1 T G N", "c": "1 T G N", "d": "H", "dt_bias": "H"},
    state="H D N",
    result="1 T H D",
    reference=(state_space_scan, stateful_state_space_scan),
    samples=_samples,
)
