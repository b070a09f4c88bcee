"""delta_rule@1 and stateful_delta_rule@1, for each value head, with the query and key of its group:

    S' = exp(decay[t]) * S[t - 1]        S[t] = S' + k[t] (beta[t] * (v[t] - k[t] S'))^T        y[t] = scale * q[t] S[t]

S [D, E] is the state; `decay` is one number for a token's head (gated delta rule), or one for each of its D rows
(Kimi delta attention); without it nothing decays. With `normalise`, q and k are first divided by sqrt(sum_d x[d]^2 +
1e-6). Packed sequences and slots: `precast.kernels.stateful.walks`.
"""

from __future__ import annotations

from typing import Any

import torch

from precast.kernels.delta_rule.step import prepared, step
from precast.kernels.linear_attention.step import token_decays
from precast.kernels.stateful.forms import form_specs, forms
from precast.kernels.stateful.walks import Recurrence, Slots, Walk, one_by_one, token_by_token


def apply_rule(
    walk: Walk,
    recurrence: Recurrence,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor | None,
    beta: torch.Tensor,
    held: Slots,
    scale: float,
    normalise: bool,
) -> torch.Tensor:
    """`q`, `k` [1, T, K, D], `v` [1, T, H, E], state [H, D, E] float32; [1, T, H, E] in q's dtype.

    H is a multiple of K: value heads of one key head lie side by side. `decay` [1, T, H] or [1, T, H, D], the logarithm
    of the factor, at most 0; `beta` [1, T, H]. Computed in float32, rounded once. `recurrence` takes queries and keys
    for each value head.
    """

    def prepared_first(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: torch.Tensor) -> Any:
        q, k = prepared(q, v, normalise) * scale, prepared(k, v, normalise)
        return recurrence(q, k, v, *others)

    return walk(prepared_first, (q, k, v, token_decays(decay, v), beta), q.new_zeros(v.shape), held)


delta_rule, stateful_delta_rule = forms("delta_rule", apply_rule, one_by_one, token_by_token(step))


DELTA_RULE, STATEFUL_DELTA_RULE = form_specs(
    "delta_rule",
    axes={"q": "1 T K D", "k": "1 T K D", "v": "1 T H E", "decay": "...", "beta": "1 T H"},
    state="H D E",
    result="1 T H E",
    reference=(delta_rule, stateful_delta_rule),
)
