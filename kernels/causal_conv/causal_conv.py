"""causal_conv@1 and stateful_causal_conv@1: y[t, c] = act(bias[c] + sum_j weight[c, j] * x[t - K + 1 + j, c]), each
channel by itself; before a sequence's first token x is zero.

state[slot, c] = x[t - K + 2 .. t + 1, c], oldest first, where t is the sequence's last token; of tokens before its
first it holds zeros. Packed sequences and slots: `precast.kernels.stateful.walks`.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from precast.ir.ops.rows_states import CONV_ACTIVATIONS
from precast.kernels.stateful.forms import form_specs, forms
from precast.kernels.stateful.walks import Slots, computed_in, one_by_one


def _convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, held: Slots, activation: str
) -> torch.Tensor:
    """`x` [1, T, C], `weight` [C, K], `bias` [C], state [C, K - 1] in x's dtype; [1, T, C] in x's dtype.

    Computed in float32, rounded once. Raises ValueError for an activation that isn't none or silu.
    """
    if activation not in CONV_ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(CONV_ACTIVATIONS)}, found {activation!r}")
    taps = weight.to(computed_in(x)).unsqueeze(1)
    offset = None if bias is None else bias.to(taps.dtype)

    def sequence(own: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        line = torch.cat((before, own.T), dim=1)
        y = functional.conv1d(line[None], taps, offset, groups=len(line))[0].T
        return functional.silu(y) if activation == "silu" else y, line[:, len(own) :]

    return one_by_one(sequence, (x,), torch.zeros_like(x, memory_format=torch.contiguous_format), held)


causal_conv, stateful_causal_conv = forms("causal_conv", _convolve)


CAUSAL_CONV, STATEFUL_CAUSAL_CONV = form_specs(
    "causal_conv",
    axes={"x": "1 T C", "weight": "C J+1", "bias": "C"},
    state="C J",
    result="1 T C",
    reference=(causal_conv, stateful_causal_conv),
)
