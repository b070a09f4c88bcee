"""gated_activation@1: y[..., f] = act(x[..., f]) * x[..., F + f]: the gate is the first half, the values the second.

Kinds: `silu` a * sigmoid(a); `gelu` a * (1 + erf(a / sqrt(2))) / 2; `gelu_tanh` its approximation
a * (1 + tanh(sqrt(2 / pi) * (a + 0.044715 a^3))) / 2. Computed in float32, rounded once at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch.nn import functional

from precast.ir.ops.rows_tokens import ACTIVATIONS
from precast.kernels.dtypes import FLOAT, widened
from precast.kernels.spec import ELEMENTWISE, OpSpec

FUNCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}
"""By the kind's name."""


def gated_activation(x: torch.Tensor, *, kind: str) -> torch.Tensor:
    """The activated first half of `x` [..., 2F] times the second; [..., F] in `x`'s dtype.

    Raises ValueError for a kind that isn't one of silu, gelu, gelu_tanh.
    """
    if kind not in ACTIVATIONS:
        raise ValueError(f"kind: expected one of {', '.join(ACTIVATIONS)}, found {kind!r}")
    gate, value = widened(x).chunk(2, dim=-1)
    return (FUNCTIONS[kind](gate) * value).to(x.dtype).contiguous()


GATED_ACTIVATION = OpSpec(
    name="precast.gated_activation",
    axes={"x": "... 2F"},
    results={"y": "... F"},
    dtypes={"x": FLOAT},
    reference=gated_activation,
    tolerances=ELEMENTWISE,
)
