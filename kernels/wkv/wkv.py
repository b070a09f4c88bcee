"""wkv@1 and stateful_wkv@1, for each channel:

    y[t] = (N[t - 1] + exp(first + k[t]) * v[t]) / (D[t - 1] + exp(first + k[t]))
    N[t] = exp(decay) * N[t - 1] + exp(k[t]) * v[t]        D[t] = exp(decay) * D[t - 1] + exp(k[t])

The state [3, C] holds N / exp(m), D / exp(m) and m, the largest exponent in D. Packed sequences and slots:
`precast.kernels.stateful.walks`.
"""

from __future__ import annotations

import torch

from precast.kernels.stateful.forms import form_specs, forms
from precast.kernels.stateful.walks import Slots, one_by_one, token_by_token
from precast.kernels.wkv.step import Sums, added, begun, kept, mean, one


def _scan(k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, first: torch.Tensor, held: Slots) -> torch.Tensor:
    """`k`, `v` [1, T, C], `decay` (at most 0), `first` [C], state [3, C] float32; [1, T, C] in v's dtype.

    Computed in float32, rounded once.
    """

    def step(k: torch.Tensor, v: torch.Tensor, sums: Sums) -> tuple[torch.Tensor, Sums]:
        y = mean(added(sums, 0.0, one(k + first.to(k.dtype), v)))
        return y, added(sums, decay.to(k.dtype), one(k, v))

    def sequence(k: torch.Tensor, v: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, sums = token_by_token(step)(k, v, begun(state))
        return y, kept(sums)

    return one_by_one(sequence, (k, v), v.new_zeros(v.shape), held)


wkv, stateful_wkv = forms("wkv", _scan)


WKV, STATEFUL_WKV = form_specs(
    "wkv",
    axes={"k": "1 T C", "v": "1 T C", "decay": "C", "first": "C"},
    state="3 C",
    result="1 T C",
    reference=(wkv, stateful_wkv),
)
