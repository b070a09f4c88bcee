"""selective_scan@1 and stateful_selective_scan@1, the scan of Mamba 1, for each channel:

    step[t] = act(dt[t] + dt_bias), where act is softplus if wanted
    h[t, n] = exp(a[n] * step[t]) * h[t - 1, n] + step[t] * x[t] * b[t, n]
    y[t] = sum_n h[t, n] * c[t, n] + d * x[t]

h [N] is the state; b and c are the same for all channels. Packed sequences and slots: `precast.kernels.stateful.walks`.
"""

from __future__ import annotations

import torch

from precast.kernels.state_space_scan.steps import steps
from precast.kernels.stateful.forms import form_specs, forms
from precast.kernels.stateful.walks import Recurrence, Slots, Walk, computed_in, one_by_one, token_by_token


def scan_channels(
    walk: Walk,
    recurrence: Recurrence,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    held: Slots,
    softplus: bool,
) -> torch.Tensor:
    """`x`, `dt` [1, T, C], `a` (below 0) [C, N], `b`, `c` [1, T, N], state [C, N] float32; [1, T, C] in x's dtype.

    `d`, `dt_bias` [C]. Computed in float32, rounded once. `recurrence` takes step * x, the steps, and a.
    """
    size = steps(dt, dt_bias, computed_in(x), softplus)

    def with_skip(
        x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, state = recurrence(dt * x, dt, a.to(dt.dtype), b, c, state)
        return y if d is None else y + d * x, state

    return walk(with_skip, (x, size, b, c), x.new_zeros(x.shape), held)


def _sequence(
    value: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    def step(
        value: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        state = torch.exp(a * dt[:, None]) * state + value[:, None] * b
        return (state * c).sum(-1), state

    return token_by_token(step)(value, dt, b, c, state)


selective_scan, stateful_selective_scan = forms("selective_scan", scan_channels, one_by_one, _sequence)


SELECTIVE_SCAN, STATEFUL_SELECTIVE_SCAN = form_specs(
    "selective_scan",
    axes={"x": "1 T C", "dt": "1 T C", "a": "C N", "b": "1 T N", "c": "1 T N", "d": "C", "dt_bias": "C"},
    state="C N",
    result="1 T C",
    reference=(selective_scan, stateful_selective_scan),
)
