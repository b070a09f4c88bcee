"""linear_recurrence@1 and stateful_linear_recurrence@1, for each channel:

    h[t] = factor[t] * h[t - 1] + x[t]            of the kind `sum`
    h[t] = max(factor[t] * h[t - 1], x[t])        of the kind `max`; x[t] where factor[t] is 0
    y[t] = h[t]

h [C] is the state: with factors of 0 and 1 the sum, or the largest, since the last 0. For x below 0 factors of the kind
`max` are 0 or 1, as products of others may come to 0. Packed sequences and slots: `precast.kernels.stateful.walks`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from precast.ir.ops.rows_states import RECURRENCES
from precast.kernels.stateful.forms import form_specs, forms
from precast.kernels.stateful.walks import Slots, one_by_one, token_by_token


def _scan(x: torch.Tensor, factor: torch.Tensor, held: Slots, kind: str) -> torch.Tensor:
    """`x`, `factor` (from 0 to 1) [1, T, C], state [C] float32; [1, T, C] in x's dtype.

    Computed in float32, rounded once. Raises ValueError for a kind that isn't sum or max.
    """
    joined = joining(kind)

    def step(x: torch.Tensor, factor: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = joined(factor, state, x)
        return state, state

    return one_by_one(token_by_token(step), (x, factor), x.new_zeros(x.shape), held)


def joining(kind: str) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """The function of a factor, the state before and the next input. Raises ValueError for an unknown kind."""
    if kind not in RECURRENCES:
        raise ValueError(f"kind: expected one of {', '.join(RECURRENCES)}, found {kind!r}")
    return _added if kind == "sum" else _larger


def _added(factor: torch.Tensor, state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return factor * state + x


def _larger(factor: torch.Tensor, state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.where(factor == 0, x, torch.maximum(factor * state, x))


linear_recurrence, stateful_linear_recurrence = forms("linear_recurrence", _scan)


LINEAR_RECURRENCE, STATEFUL_LINEAR_RECURRENCE = form_specs(
    "linear_recurrence",
    axes={"x": "1 T C", "factor": "1 T C"},
    state="C",
    result="1 T C",
    reference=(linear_recurrence, stateful_linear_recurrence),
)
