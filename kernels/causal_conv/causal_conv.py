"""causal_conv@1 and stateful_causal_conv@1: y[t, c] = act(bias[c] + sum_j weight[c, j] * x[t - K + 1 + j, c]), each
channel by itself; before a sequence's first token x is zero.

state[slot, c] = x[t - K + 2 .. t + 1, c], oldest first, where t is the sequence's last token; of tokens before its
first it holds zeros. Packed sequences and slots: `precast.kernels.states`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from precast.ir.ops.rows_states import CONV_ACTIVATIONS
from precast.kernels.forms import form_specs, forms
from precast.kernels.spec import Draw, Sample
from precast.kernels.states import Slots, bounds_of, computed_in, one_by_one, sequence_samples, spoiled, state_sample


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


def _samples(draw: Draw) -> Iterator[Sample]:
    for i, (sequences, padding, nameless) in enumerate(sequence_samples()):
        channels, width = (6, 4) if i % 2 else (5, 3)
        end = bounds_of(sequences)[-1]
        yield {
            "x": spoiled(draw.normal(1, end + padding, channels), end),
            "weight": draw.normal(channels, width),
            "bias": draw.normal(channels) if i % 3 else None,
            **state_sample(draw, sequences, nameless, (channels, width - 1), draw.dtype),
            "activation": "silu" if i % 2 else "none",
        }
    # One tap needs no state; a slice of a fused product; weights in float32.
    sequences = ((3, 3), (2, 8))
    yield {
        "x": draw.normal(1, 5, 4),
        "weight": draw.normal(4, 1),
        "bias": None,
        **state_sample(draw, sequences, (), (4, 0), draw.dtype),
        "activation": "silu",
    }
    yield {
        "x": draw.normal(1, 5, 12)[..., 4:8],
        "weight": draw.normal(4, 4, dtype=torch.float32),
        "bias": draw.normal(4, dtype=torch.float32),
        **state_sample(draw, sequences, (), (4, 3), draw.dtype),
    }


CAUSAL_CONV, STATEFUL_CAUSAL_CONV = form_specs(
    "causal_conv",
    axes={"x": "1 T C", "weight": "C J+1", "bias": "C"},
    state="C J",
    result="1 T C",
    reference=(causal_conv, stateful_causal_conv),
    samples=_samples,
)
