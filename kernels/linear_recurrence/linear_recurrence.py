"""linear_recurrence@1 and stateful_linear_recurrence@1, for each channel:

    h[t] = factor[t] * h[t - 1] + x[t]            of the kind `sum`
    h[t] = max(factor[t] * h[t - 1], x[t])        of the kind `max`, for x of at least 0
    y[t] = h[t]

h [C] is the state. Packed sequences and slots: `precast.kernels.states`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from precast.kernels.forms import form_specs, forms
from precast.kernels.linear_recurrence.joining import joining
from precast.kernels.spec import Draw, Sample
from precast.kernels.states import Slots, bounds_of, one_by_one, sequence_samples, spoiled, state_sample


def _scan(x: torch.Tensor, factor: torch.Tensor, held: Slots, kind: str) -> torch.Tensor:
    """`x`, `factor` (from 0 to 1) [1, T, C], state [C] float32; [1, T, C] in x's dtype.

    Computed in float32, rounded once. Raises ValueError for a kind that isn't sum or max.
    """
    joined = joining(kind)

    def sequence(x: torch.Tensor, factor: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = []
        for t in range(len(x)):
            state = joined(factor[t] * state, x[t])
            rows.append(state)
        return torch.stack(rows), state

    return one_by_one(sequence, (x, factor), x.new_zeros(x.shape), held)


linear_recurrence, stateful_linear_recurrence = forms("linear_recurrence", _scan)


def _samples(draw: Draw) -> Iterator[Sample]:
    channels = 7
    for i, (sequences, padding, nameless) in enumerate(sequence_samples()):
        end = bounds_of(sequences)[-1]
        tokens = end + padding
        kind = ("sum", "max")[i % 2]
        x = draw.normal(1, tokens, channels) if kind == "sum" else draw.uniform(1, tokens, channels)
        states = state_sample(draw, sequences, nameless, (channels,), torch.float32)
        # What decays at once and what hardly does: products of many factors reach 0 on the way.
        low, high = ((0.9, 1.0), (0.0, 0.2), (0.0, 1.0))[i % 3]
        yield {
            "x": spoiled(x, end),
            "factor": spoiled(draw.uniform(1, tokens, channels, low=low, high=high), end),
            **states | {"state": states["state"] if kind == "sum" else states["state"].abs()},
            "kind": kind,
        }
    sequences = ((5, 9), (1, 1))
    fused = draw.uniform(1, 6, 8)
    yield {"x": fused[..., :4], "factor": fused[..., 4:], **state_sample(draw, sequences, (), (4,), torch.float32)}


LINEAR_RECURRENCE, STATEFUL_LINEAR_RECURRENCE = form_specs(
    "linear_recurrence",
    axes={"x": "1 T C", "factor": "1 T C"},
    state="C",
    result="1 T C",
    reference=(linear_recurrence, stateful_linear_recurrence),
    samples=_samples,
)
