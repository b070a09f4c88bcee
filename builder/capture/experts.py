"""Routes a Hugging Face model's mixtures of experts to `precast.experts` while the model is traced.

transformers lets an experts implementation be registered by name. Ours makes one call for each layer, however many
experts it has. What a module's gate computes is found by trying it on numbers (`find_gate`), never by its name; a gate
that is none of ours is traced between two grouped products.

Weights that lie transposed or interleaved get our layout by operations on the params: `fold_param_views` makes recipes
of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers.integrations.moe import ExpertsInterface

from precast.builder.capture.routing import IMPLEMENTATION
from precast.ir.errors import BuildError
from precast.ir.ops.rows_experts import EXPERT_ACTIVATIONS
from precast.kernels.experts.experts import Between, activate

_FAR = 1e6
"""Beyond every clamp."""


@dataclasses.dataclass(frozen=True)
class Gate:
    """What a layer of experts computes between its two products; the attributes of `precast.experts`."""

    activation: str
    gated: bool
    interleaved: bool = False
    """Whether gates and values take turns in the first product's result; else all gates come first."""
    alpha: float = 1.0
    limit: float | None = None
    offset: float = 0.0

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        """The result for `h` [..., 2F], or [..., F] where there is no gate, in the module's own layout."""
        if self.interleaved:
            h = torch.cat([h[..., ::2], h[..., 1::2]], dim=-1)
        return activate(h, Between(self.activation, self.gated, self.alpha, self.limit, self.offset))


@contextlib.contextmanager
def routed_experts() -> Iterator[None]:
    """Registers the implementation with transformers."""
    ExpertsInterface.register(IMPLEMENTATION, _experts)
    yield


def find_gate(function: Callable[[torch.Tensor], torch.Tensor], *, gated: bool) -> Gate | None:
    """The gate that `function` computes, a map of `[N, 2F]` (ungated: `[N, F]`) to `[N, F]`; None for no gate of ours.

    Constants (clamps, the sigmoid's factor, what is added to the values) are read off the function's results, and the
    gate that comes of them must give the same as the function on numbers all over its range.
    """
    with _disable_current_modes(), torch.no_grad():
        try:
            for interleaved in (False, True) if gated else (False,):
                for gate in _candidates(function, gated, interleaved):
                    if _agree(function, gate):
                        return gate
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            return None  # it takes no such numbers on the CPU: it has params of its own, or another shape
    return None


def _candidates(function: Callable[[torch.Tensor], torch.Tensor], gated: bool, interleaved: bool) -> Iterator[Gate]:
    for kind in EXPERT_ACTIVATIONS:
        yield Gate(kind, gated, interleaved)
    if not gated:
        yield from (Gate("silu", False, alpha=alpha) for alpha in _snapped(_alpha(_at(function, 1.0))))
        return
    at = _pairs(function, interleaved)
    slope = (at(1.0, 0.125) - at(1.0, 0.0)) / 0.125  # act(1)
    if slope <= 0:
        return
    for offset in _snapped(at(1.0, 0.0) / slope):
        for limit in _snapped((at(1.0, _FAR) - at(1.0, -_FAR)) / (2 * slope)):
            clamp = None if limit >= 0.99 * _FAR else limit
            for kind in EXPERT_ACTIVATIONS:
                yield Gate(kind, True, interleaved, 1.0, clamp, offset)
            for alpha in _snapped(_alpha(slope)):
                yield Gate("silu", True, interleaved, alpha, clamp, offset)


def _alpha(at_one: float) -> float:
    """The factor with which sigmoid gives this for 1."""
    return math.log(at_one / (1 - at_one)) if 0 < at_one < 1 else 1.0


def _snapped(value: float) -> tuple[float, ...]:
    """A constant that was read off results: as short as someone would write it, then as precise as it was read."""
    return tuple(dict.fromkeys((float(f"{value:.6g}"), float(f"{value:.12g}")))) if math.isfinite(value) else ()


def _at(function: Callable[[torch.Tensor], torch.Tensor], x: float) -> float:
    return float(function(torch.full((1, 4), x, dtype=torch.float64))[0, 0])


def _pairs(function: Callable[[torch.Tensor], torch.Tensor], interleaved: bool) -> Callable[[float, float], float]:
    def at(gate: float, value: float) -> float:
        parts = torch.tensor([[gate, gate], [value, value]], dtype=torch.float64)
        h = parts.T.reshape(1, 4) if interleaved else parts.reshape(1, 4)
        return float(function(h)[0, 0])

    return at


def _agree(function: Callable[[torch.Tensor], torch.Tensor], gate: Gate) -> bool:
    """Whether both give the same, for small numbers, large ones, and signed zeros."""
    generator = torch.Generator().manual_seed(0)
    for scale in (0.1, 1.0, 4.0, 50.0):
        h = torch.randn(16, 14, generator=generator, dtype=torch.float64) * scale
        h[0, ::3] = 0.0
        found, expected = function(h), gate(h)
        if found.shape != expected.shape or not torch.allclose(found.double(), expected, rtol=1e-6, atol=1e-7):
            return False
    return True


def mixture(
    x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor,
    act: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """Experts of a module that transformers' interface doesn't reach, as one call: [T, I] in `x`'s dtype.

    `x` [T, I], `expert_ids` and `expert_weights` [T, K]; `up` [E, 2F, I], gates before values, `down` [E, I, F];
    between the two stands `act(gate) * value`.
    """

    def function(h: torch.Tensor) -> torch.Tensor:
        gate, value = h.chunk(2, dim=-1)
        return act(gate) * value

    return mixture_with(function, x, expert_ids, expert_weights, up, down)


def mixture_with(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, expert_ids: torch.Tensor,
    expert_weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """As `mixture`, with `function` of gates and values, [N, 2F] to [N, F], between the two products."""
    gate = find_gate(function, gated=True)
    return _call(function, gate, x, expert_ids, expert_weights, (up, None), (down, None))


def _experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Tokens [T, I], their experts [T, K] and the experts' weights [T, K] -> [T, I]."""
    if hidden_states.dim() != 2:
        raise BuildError(
            "feature-unsupported",
            f"{type(module).__name__} takes {hidden_states.dim()} dimensions, expected tokens and their elements",
        )
    function = module._apply_gate if module.has_gate else module.act_fn
    # transformers 5.17 knows no norm after experts.
    norm = module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None
    gate = None if norm is not None else find_gate(function, gated=module.has_gate)
    interleaved = gate is not None and gate.interleaved
    up = _weight(module, "gate_up_proj" if module.has_gate else "up_proj", interleaved=interleaved)
    down = _weight(module, "down_proj", interleaved=False)
    x = hidden_states.to(up[0].dtype)
    y = _call(function, gate, x, top_k_index, top_k_weights, up, down, norm)
    return y.to(hidden_states.dtype)


def _weight(module: Any, name: str, *, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A product's weight [E, O, I] and bias [E, O] in our layout."""
    weight = getattr(module, name)
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    if module.is_transposed:
        weight = weight.transpose(1, 2)
    if interleaved:
        num, rows, size = weight.shape
        weight = weight.reshape(num, rows // 2, 2, size).transpose(1, 2).reshape(num, rows, size)
        bias = None if bias is None else bias.reshape(num, rows // 2, 2).transpose(1, 2).reshape(num, rows)
    return weight, bias


def _call(
    function: Callable[[torch.Tensor], torch.Tensor], gate: Gate | None, x: torch.Tensor, ids: torch.Tensor,
    weights: torch.Tensor, up: tuple[torch.Tensor, torch.Tensor | None], down: tuple[torch.Tensor, torch.Tensor | None],
    norm: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:  # fmt: skip
    """`precast.experts`; without a gate of ours, `function` and `norm` between and after grouped products."""
    if gate is not None:
        return torch.ops.precast.experts(
            x, ids, weights, up[0], down[0], up[1], down[1],
            activation=gate.activation, gated=gate.gated, alpha=gate.alpha, limit=gate.limit, offset=gate.offset,
        )  # fmt: skip
    (tokens, size), top_k = x.shape, ids.shape[1]
    rows = x[:, None].expand(tokens, top_k, size).reshape(-1, size)
    flat = ids.reshape(-1)
    h = function(torch.ops.precast.grouped_linear(rows, *up, flat))
    y = torch.ops.precast.grouped_linear(h, *down, flat)
    if norm is not None:
        y = norm(y)
    return (y.reshape(tokens, top_k, size) * weights[:, :, None]).sum(dim=1)
