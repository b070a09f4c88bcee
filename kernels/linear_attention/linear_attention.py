"""linear_attention@1 and stateful_linear_attention@1, for each head:

    S[t] = exp(decay[t]) * S[t - 1] + k[t] v[t]^T        y[t] = scale * q[t] S[t]

S [D, E] is the state; `decay` is one number for a head, for a token's head, or for each of its D rows; without it
nothing decays. Packed sequences and slots: `precast.kernels.stateful.walks`.
"""

from __future__ import annotations

import torch

from precast.kernels.linear_attention.step import step, token_decays
from precast.kernels.stateful.forms import form_specs, forms
from precast.kernels.stateful.walks import Slots, one_by_one, token_by_token


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor | None, held: Slots, scale: float
) -> torch.Tensor:
    """`q`, `k` [1, T, H, D], `v` [1, T, H, E], state [H, D, E] float32; [1, T, H, E] in q's dtype.

    `decay` [H], [1, T, H] or [1, T, H, D], the logarithm of the factor, at most 0. Computed in float32, rounded once.
    """

    def scaled(q: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return step(q * scale, *others)

    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    return one_by_one(token_by_token(scaled), (q, k, v, token_decays(decay, v)), out, held)


linear_attention, stateful_linear_attention = forms("linear_attention", _attend)


LINEAR_ATTENTION, STATEFUL_LINEAR_ATTENTION = form_specs(
    "linear_attention",
    axes={"q": "1 T H D", "k": "1 T H D", "v": "1 T H E", "decay": "..."},
    state="H D E",
    result="1 T H E",
    reference=(linear_attention, stateful_linear_attention),
)
