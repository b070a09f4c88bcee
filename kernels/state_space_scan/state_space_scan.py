"""state_space_scan@1 and stateful_state_space_scan@1, the scan of Mamba 2, for each head, with its group's b and c:

    step[t] = clamp(act(dt[t] + dt_bias), dt_min, dt_max), where act is softplus if wanted
    h[t] = exp(a * step[t]) * h[t - 1] + step[t] * x[t] b[t]^T        y[t] = h[t] c[t] + d * x[t]

h [D, N] is the state. Packed sequences and slots: `precast.kernels.states`.
"""

from __future__ import annotations

import torch

from precast.kernels.forms import form_specs, forms
from precast.kernels.state_space_scan.steps import steps
from precast.kernels.states import Slots, computed_in, one_by_one


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


STATE_SPACE_SCAN, STATEFUL_STATE_SPACE_SCAN = form_specs(
    "state_space_scan",
    axes={"x": "1 T H D", "dt": "1 T H", "a": "H", "b": "1 T G N", "c": "1 T G N", "d": "H", "dt_bias": "H"},
    state="H D N",
    result="1 T H D",
    reference=(state_space_scan, stateful_state_space_scan),
)
