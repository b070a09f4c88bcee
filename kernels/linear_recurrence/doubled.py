"""The linear recurrence for speed in PyTorch: by doubling, so that a sequence of L tokens takes about log2(L) steps.

After step i each token holds what the last 2^i tokens up to it come to, and the product of their factors. Factors
from 0 to 1 are only ever multiplied: products may vanish, and can't overflow.
"""

from __future__ import annotations

import torch

from precast.kernels.linear_recurrence.linear_recurrence import joining
from precast.kernels.stateful.forms import forms
from precast.kernels.stateful.walks import Slots, together


def _scan(x: torch.Tensor, factor: torch.Tensor, held: Slots, kind: str) -> torch.Tensor:
    joined = joining(kind)

    def batch(
        x: torch.Tensor, factor: torch.Tensor, is_there: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # After a shorter sequence's end x adds nothing, and the state stays what it is.
        factor = factor.masked_fill(is_there == 0, 1.0)
        if kind == "max":
            x = x.masked_fill(is_there == 0, float("-inf"))
        h = torch.cat((joined(factor[:, :1], state[:, None], x[:, :1]), x[:, 1:]), 1)
        reach = 1
        while reach < h.shape[1]:
            h = torch.cat((h[:, :reach], joined(factor[:, reach:], h[:, :-reach], h[:, reach:])), 1)
            factor = torch.cat((factor[:, :reach], factor[:, reach:] * factor[:, :-reach]), 1)
            reach *= 2
        return h, h[:, -1]

    return together(batch, (x, factor, torch.ones_like(x[..., :1])), x.new_zeros(x.shape), held)


linear_recurrence, stateful_linear_recurrence = forms("linear_recurrence", _scan)
