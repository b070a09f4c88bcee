"""wkv@1 and stateful_wkv@1, for each channel:

    y[t] = (N[t - 1] + exp(first + k[t]) * v[t]) / (D[t - 1] + exp(first + k[t]))
    N[t] = exp(decay) * N[t - 1] + exp(k[t]) * v[t]        D[t] = exp(decay) * D[t - 1] + exp(k[t])

The state [3, C] holds N / exp(m), D / exp(m) and m, the largest exponent in D. Packed sequences and slots:
`precast.kernels.states`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from precast.kernels.forms import form_specs, forms
from precast.kernels.spec import Draw, Sample
from precast.kernels.states import Slots, bounds_of, one_by_one, sequence_samples, spoiled, state_sample
from precast.kernels.wkv.step import added, begun, kept, mean, one


def _scan(k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, first: torch.Tensor, held: Slots) -> torch.Tensor:
    """`k`, `v` [1, T, C], `decay` (at most 0), `first` [C], state [3, C] float32; [1, T, C] in v's dtype.

    Computed in float32, rounded once.
    """

    def sequence(k: torch.Tensor, v: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sums, rows = begun(state), []
        for t in range(len(k)):
            rows.append(mean(added(sums, 0.0, one(k[t] + first.to(k.dtype), v[t]))))
            sums = added(sums, decay.to(k.dtype), one(k[t], v[t]))
        return torch.stack(rows), kept(sums)

    return one_by_one(sequence, (k, v), v.new_zeros(v.shape), held)


wkv, stateful_wkv = forms("wkv", _scan)


def _samples(draw: Draw) -> Iterator[Sample]:
    channels = 7
    for i, (sequences, padding, nameless) in enumerate(sequence_samples()):
        end = bounds_of(sequences)[-1]
        tokens = end + padding
        states = state_sample(draw, sequences, nameless, (3, channels), torch.float32)
        states["state"][:, 1] = states["state"][:, 1].abs() + 0.5  # a sum of positive numbers
        yield {
            # Exponents beyond what exp can take, too.
            "k": spoiled(draw.normal(1, tokens, channels, scale=(1.0, 60.0)[i % 2]), end),
            "v": spoiled(draw.normal(1, tokens, channels), end),
            "decay": -draw.uniform(channels, high=(0.5, 30.0)[i % 2], dtype=torch.float32),
            "first": draw.normal(channels),
            **states,
        }
    sequences = ((5, 5), (1, 1))
    fused = draw.normal(1, 6, 8)
    yield {
        "k": fused[..., :4],
        "v": fused[..., 4:],
        "decay": -draw.uniform(4),
        "first": draw.normal(4),
        **state_sample(draw, sequences, (), (3, 4), torch.float32),
    }


WKV, STATEFUL_WKV = form_specs(
    "wkv",
    axes={"k": "1 T C", "v": "1 T C", "decay": "C", "first": "C"},
    state="3 C",
    result="1 T C",
    reference=(wkv, stateful_wkv),
    samples=_samples,
)
