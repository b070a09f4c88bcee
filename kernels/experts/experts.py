"""experts@1: y[t] = sum_j expert_weights[t, j] * mlp(x[t], expert_ids[t, j]), the experts of a feed-forward layer.

    h = x @ up[e]^T + up_bias[e]
    h = act(clamp(h[:F], max=limit)) * (clamp(h[F:], -limit, limit) + offset)    if `gated`, else act(h)
    mlp(x, e) = h @ down[e]^T + down_bias[e]

Kinds of `activation`: `silu` a * sigmoid(alpha * a), where 1 is the usual `alpha`; `gelu`; `gelu_tanh`, its
approximation; `relu`; `relu2` relu(a)^2. An id that is no expert's adds nothing. Computed in float32 (float64 for
float64), rounded once at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch.nn import functional

from precast.ir.ops.rows_experts import EXPERT_ACTIVATIONS
from precast.kernels.calls import implements
from precast.kernels.dtypes import FLOAT, widened
from precast.kernels.gated_activation.gated_activation import FUNCTIONS
from precast.kernels.spec import PRODUCT, OpSpec

_FUNCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **FUNCTIONS,
    "relu": functional.relu,
    "relu2": lambda a: functional.relu(a).square(),
}


class Layers(NamedTuple):
    """Both products of all experts: `up` [E, 2F, I], gate before values (ungated: [E, F, I]), `down` [E, I, F]; biases
    [E, 2F], [E, I]."""

    up: torch.Tensor
    down: torch.Tensor
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


class Between(NamedTuple):
    """What stands between the two products."""

    activation: str
    gated: bool
    alpha: float = 1.0
    limit: float | None = None
    offset: float = 0.0


@implements("experts")
def experts(
    x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor, layers: Layers, between: Between
) -> torch.Tensor:
    """The weighted sum of each token's experts: [T, I] in `x`'s dtype.

    `x` [T, I], `expert_ids` [T, K] int64, `expert_weights` [T, K]; `layers` have `x`'s dtype. Raises ValueError for an
    activation that the module's docstring doesn't name.
    """
    up, down, *biases = layers
    weights = ((up[expert], down[expert]) for expert in range(up.shape[0]))
    return weighted_sum(x, expert_ids, expert_weights, weights, tuple(biases), between)


def weighted_sum(
    x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor,
    weights: Iterable[tuple[torch.Tensor, torch.Tensor]], biases: tuple[torch.Tensor | None, ...], between: Between,
    rounded: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:  # fmt: skip
    """`precast.experts`, of both matrices of each expert in turn and the biases of all: `up_bias` and `down_bias`.

    `rounded`: what the rows [N, I], [N, F] become that are multiplied, in float32 (float64); those between the products
    are rounded to `x`'s dtype before.
    """
    total = widened(x).new_zeros(x.shape)
    for expert, (up, down) in enumerate(weights):
        up_bias, down_bias = (_row(bias, expert) for bias in biases)
        tokens, places = (expert_ids == expert).nonzero(as_tuple=True)
        rows = widened(x[tokens])
        h = activate(functional.linear(rounded(rows) if rounded else rows, widened(up), up_bias), between)
        h = rounded(widened(h.to(x.dtype))) if rounded else h
        h = functional.linear(h, widened(down), down_bias)
        total.index_add_(0, tokens, h * expert_weights[tokens, places, None].to(h.dtype))
    return total.to(x.dtype)


def _row(bias: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    return None if bias is None else widened(bias[expert])


def activate(h: torch.Tensor, between: Between) -> torch.Tensor:
    """What stands between the two products: `h` [..., 2F], or [..., F] where there is no gate, -> [..., F]."""
    kind, gated, alpha, limit, offset = between
    if not gated:
        return _activate(h, kind, alpha)
    gate, value = h.chunk(2, dim=-1)
    if limit is not None:
        gate, value = gate.clamp(max=limit), value.clamp(-limit, limit)
    return _activate(gate, kind, alpha) * (value + offset)


def _activate(a: torch.Tensor, kind: str, alpha: float) -> torch.Tensor:
    if kind not in EXPERT_ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(EXPERT_ACTIVATIONS)}, found {kind!r}")
    if kind == "silu" and alpha != 1.0:
        return a * torch.sigmoid(alpha * a)
    return _FUNCTIONS[kind](a)


EXPERTS = OpSpec(
    name="precast.experts",
    axes={
        "x": "T I",
        "expert_ids": "T K",
        "expert_weights": "T K",
        "up": "E U I",
        "down": "E I F",
        "up_bias": "E U",
        "down_bias": "E I",
    },
    results={"y": "T I"},
    dtypes={
        **dict.fromkeys(("x", "expert_weights", "up", "down", "up_bias", "down_bias"), FLOAT),
        "expert_ids": (torch.int64,),
    },
    reference=experts,
    tolerances=PRODUCT,
)
