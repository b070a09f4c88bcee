"""causal_conv@1: y[t, c] = act(bias[c] + sum_j weight[c, j] * x[t - K + 1 + j, c]), each channel by itself; before a
sequence's first token x is zero. Packed sequences: `precast.kernels.states`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from precast.kernels.causal_conv import gathered
from precast.kernels.causal_conv.stateful import STATEFUL_CAUSAL_CONV, convolve
from precast.kernels.dtypes import FLOAT
from precast.kernels.spec import PRODUCT, Draw, OpSpec, Sample
from precast.kernels.states import fresh, without_states


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    *,
    activation: str = "none",
) -> torch.Tensor:
    """`x` [1, T, C], `weight` [C, K], `bias` [C], `cu_seqlens` [B + 1] int32; [1, T, C] in x's dtype.

    Computed in float32, rounded once. Raises ValueError for an activation that isn't none or silu.
    """
    held = fresh(cu_seqlens, (x.shape[2], weight.shape[1] - 1), x)
    return convolve(x, weight, bias, held, activation)


def _samples(draw: Draw) -> Iterator[Sample]:
    return map(without_states, STATEFUL_CAUSAL_CONV.samples(draw))


CAUSAL_CONV = OpSpec(
    name="precast.causal_conv",
    axes={"x": "1 T C", "weight": "C K", "bias": "C", "cu_seqlens": "B+1"},
    results={"y": "1 T C"},
    dtypes={"x": FLOAT, "weight": FLOAT, "bias": FLOAT, "cu_seqlens": (torch.int32,)},
    reference=causal_conv,
    samples=_samples,
    tolerances=PRODUCT,
    implementations={"cpu": lambda: gathered.causal_conv, "cuda": lambda: gathered.causal_conv},
)
