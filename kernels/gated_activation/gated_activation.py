"""gated_activation@1: y[..., f] = act(x[..., f]) * x[..., F + f]: the gate is the first half, the values the second.

Kinds: `silu` a * sigmoid(a); `gelu` a * (1 + erf(a / sqrt(2))) / 2; `gelu_tanh` its approximation
a * (1 + tanh(sqrt(2 / pi) * (a + 0.044715 a^3))) / 2. Computed in float32, rounded once at the end.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from precast.ir.ops.rows_tokens import ACTIVATIONS
from precast.kernels.dtypes import FLOAT, widened
from precast.kernels.spec import ELEMENTWISE, OpSpec


def gated_activation(x: torch.Tensor, *, kind: str) -> torch.Tensor:
    """The activated first half of `x` [..., 2F] times the second; [..., F] in `x`'s dtype.

    Raises ValueError for a kind that isn't one of silu, gelu, gelu_tanh.
    """
    gate, value = widened(x).chunk(2, dim=-1)
    return (_activate(gate, kind) * value).to(x.dtype).contiguous()


def _activate(gate: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "silu":
        return functional.silu(gate)
    if kind == "gelu":
        return functional.gelu(gate)
    if kind == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh")
    raise ValueError(f"kind: expected one of {', '.join(ACTIVATIONS)}, found {kind!r}")


GATED_ACTIVATION = OpSpec(
    name="precast.gated_activation",
    axes={"x": "... 2F"},
    results={"y": "... F"},
    dtypes={"x": FLOAT},
    reference=gated_activation,
    tolerances=ELEMENTWISE,
)
