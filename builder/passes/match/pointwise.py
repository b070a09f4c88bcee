"""Finds activation functions that models write out, gates (an activation times something), and scaled embeddings."""

from __future__ import annotations

import math
from typing import Any

import torch

from precast.builder.graph.context import FxGraph, FxNode, PassContext, tensor
from precast.builder.graph.match import Add, Bind, Bindings, Mul, Number, Op, match
from precast.builder.passes.graph_pass import graph_pass, node_pass
from precast.builder.passes.match.params import fuse, fusible

aten = torch.ops.aten

_X = Bind("x")
_CUBIC = Add(_X, Mul(Op(aten.pow.Tensor_Scalar, _X, 3.0), 0.044715))
_TANH_GELU = Mul(Mul(_X, 0.5), Add(Op(aten.tanh.default, Mul(_CUBIC, math.sqrt(2.0 / math.pi))), 1.0))


@node_pass(stage="match", version=1)
def match_activations(ctx: PassContext, node: FxNode) -> FxNode | None:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) -> gelu(x, approximate="tanh")."""
    found = match(_TANH_GELU, node)
    return ctx.call(aten.gelu.default, found["x"], approximate="tanh") if found else None


class _Activation:
    """One of the gates' activations over `inner`; binds its name as `kind`."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def match(self, value: Any, found: Bindings) -> Bindings | None:
        if not isinstance(value, FxNode):
            return None
        if value.target is aten.silu.default:
            kind = "silu"
        elif value.target is aten.gelu.default:
            kind = "gelu_tanh" if value.kwargs.get("approximate") == "tanh" else "gelu"
        else:
            return None
        bound: Bindings | None = self.inner.match(value.args[0], found)
        return None if bound is None else {**bound, "kind": kind}


_SEPARATE = Mul(_Activation(Bind("gate")), Bind("up"))
_DIM = Number("dim")
_HALVES = Mul(
    _Activation(Op(aten.slice.Tensor, Bind("x"), _DIM, 0, Number("half"), 1)),
    Op(aten.slice.Tensor, Bind("x"), _DIM, Number("half"), Number("end"), 1),
)


@node_pass(stage="match", version=2, requires=("normalise_views", "normalise_linear", "match_activations"))
def fuse_gated_activation(ctx: PassContext, node: FxNode) -> FxNode | None:
    """act(linear(x, g)) * linear(x, u) -> gated_activation(linear(x, concat(g, u))); act(y[:h]) * y[h:] likewise."""
    fused = (_halves(node) or _separate(ctx, node)) if node.target is aten.mul.Tensor else None
    if fused is None:
        return None
    both, kind = fused
    with ctx.before(node):
        return ctx.call(torch.ops.precast.gated_activation.default, both, kind=kind)


def _halves(node: FxNode) -> tuple[FxNode, str] | None:
    found = match(_HALVES, node)
    if found is None:
        return None
    x = found["x"]
    size = tensor(x).shape[-1]
    last = found["dim"] == tensor(x).dim() - 1
    return (x, found["kind"]) if last and found["end"] == size and 2 * found["half"] == size else None


def _separate(ctx: PassContext, node: FxNode) -> tuple[FxNode, str] | None:
    found = match(_SEPARATE, node)
    if found is None:
        return None
    parts = [found["gate"], found["up"]]
    if not fusible(parts, ctx) or len({tensor(part).shape[-1] for part in parts}) != 1:
        return None
    if any(len(part.users) != 1 for part in parts):
        return None  # the product would be computed twice
    return fuse(ctx, parts), found["kind"]


_LOOKUP = Op(aten.embedding.default, Bind("weight"), Bind("ids"), *[Bind(f"_{i}") for i in range(3)])
_SCALED = Mul(_LOOKUP, Bind("scale"))


@graph_pass(stage="match", version=1, requires=("remove_noops",))
def match_embedding(graph: FxGraph, ctx: PassContext) -> bool:
    """embedding(weight, ids) * scale -> precast.embedding(ids, weight, scale).

    The op rounds the scale to the weight's type. A number that this would change stays a product of its own.
    """
    changed = False
    for pattern in (_SCALED, _LOOKUP):
        for node in list(graph.nodes):
            found = match(pattern, node) if node.op == "call_function" else None
            scale = _scale(found, ctx) if found else None
            if found is None or scale is None:
                continue
            with ctx.before(node):
                new = ctx.call(torch.ops.precast.embedding.default, found["ids"], found["weight"], scale=scale)
            ctx.replace(node, new)
            changed = True
    return changed


def _scale(found: Bindings, ctx: PassContext) -> float | None:
    """The scale as a number of the weight's type; None where it is not known or would be rounded."""
    scale = found.get("scale", 1.0)
    dtype = tensor(found["weight"]).dtype
    if isinstance(scale, FxNode):
        scale = _number(scale, dtype, ctx)
    if scale is None:
        return None
    return float(scale) if float(torch.tensor(scale, dtype=dtype)) == scale else None


def _number(scale: FxNode, dtype: torch.dtype, ctx: PassContext) -> float | None:
    """A constant without dimensions, rounded where the model rounds it."""
    rounded = scale.target is aten.to.dtype and scale.args[1] == dtype
    constant = ctx.constant(scale.args[0] if rounded else scale)
    if constant is None or constant.dim():
        return None
    return float(constant.to(dtype) if rounded else constant)
