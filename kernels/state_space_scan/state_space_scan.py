"""state_space_scan@1 and stateful_state_space_scan@1, the scan of Mamba 2, for each head, with its group's b and c:

    step[t] = clamp(act(dt[t] + dt_bias), dt_min, dt_max), where act is softplus if wanted
    h[t] = exp(a * step[t]) * h[t - 1] + step[t] * x[t] b[t]^T        y[t] = h[t] c[t] + d * x[t]

h [D, N] is the state. Packed sequences and slots: `precast.kernels.stateful.walks`.
"""

from __future__ import annotations

import torch

from precast.kernels.state_space_scan.steps import steps
from precast.kernels.stateful.forms import form_specs, forms
from precast.kernels.stateful.walks import Recurrence, Slots, Walk, computed_in, one_by_one, token_by_token


def scan_heads(
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
    dt_min: float,
    dt_max: float,
) -> torch.Tensor:
    """`x` [1, T, H, D], `dt` [1, T, H], `b`, `c` [1, T, G, N], state [H, D, N] float32; [1, T, H, D] in x's dtype.

    `a` (below 0), `d`, `dt_bias` [H]; H is a multiple of G: heads of one group lie side by side. Computed in float32,
    rounded once. `recurrence` takes step * x, the decay a * step, and b and c for each head.
    """
    size = steps(dt, dt_bias, computed_in(x), softplus, dt_min, dt_max)
    repeats = x.shape[2] // b.shape[2]

    def with_skip(
        x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        b, c = (z.repeat_interleave(repeats, dim=-2) for z in (b, c))
        value, decay = dt[..., None] * x, a.to(dt.dtype) * dt
        y, state = recurrence(value, decay, b, c, state)
        return y if d is None else y + d[:, None] * x, state

    return walk(with_skip, (x, size, b, c), x.new_zeros(x.shape), held)


def _step(
    value: torch.Tensor, decay: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: `value` [H, D], `decay` [H], `b`, `c` [H, N]."""
    state = torch.exp(decay)[:, None, None] * state + value[:, :, None] * b[:, None, :]
    return (state * c[:, None, :]).sum(-1), state


state_space_scan, stateful_state_space_scan = forms("state_space_scan", scan_heads, one_by_one, token_by_token(_step))


STATE_SPACE_SCAN, STATEFUL_STATE_SPACE_SCAN = form_specs(
    "state_space_scan",
    axes={"x": "1 T H D", "dt": "1 T H", "a": "H", "b": "1 T G N", "c": "1 T G N", "d": "H", "dt_bias": "H"},
    state="H D N",
    result="1 T H D",
    reference=(state_space_scan, stateful_state_space_scan),
)
