"""sample where the parameters lie in host memory: looking at them is free, so rows do no work that they don't ask for.

The same functions as the reference's, on fewer rows: its results don't depend on the other rows of the batch.
"""

from __future__ import annotations

import torch

from precast.kernels.calls import implements
from precast.kernels.sampling.sample import Parameters, marked, passed, pick, scaled


@implements("sample")
def sample(logits: torch.Tensor, parameters: Parameters) -> torch.Tensor:
    """`precast.sample@1`, see `precast.kernels.sampling.sample`."""
    return _drawn(logits, parameters)


@implements("sample", version=2)
def sample_2(logits: torch.Tensor, parameters: Parameters) -> torch.Tensor:
    """`precast.sample@2`."""
    return marked(logits, _drawn(logits, parameters))


def _drawn(logits: torch.Tensor, parameters: Parameters) -> torch.Tensor:
    temperature, top_k, top_p, min_p, seeds, steps = parameters
    tokens = logits.argmax(-1)
    rows = (temperature > 0).nonzero()[:, 0]
    if len(rows) == 0:
        return tokens
    x = scaled(logits[rows], temperature[rows])
    filtered = ((top_k[rows] > 0) | (top_p[rows] < 1) | (min_p[rows] > 0)).nonzero()[:, 0]
    if len(filtered) > 0:
        chosen = rows[filtered]
        kept = passed(x[filtered], top_k[chosen], top_p[chosen], min_p[chosen])
        x[filtered] = x[filtered].masked_fill_(~kept, float("-inf"))
    tokens[rows] = pick(x, seeds[rows], steps[rows])
    return tokens
