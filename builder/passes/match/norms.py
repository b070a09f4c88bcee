"""Finds normalisations in the spellings of Hugging Face's models, and fuses them with the residual sum before them."""

from __future__ import annotations

from typing import Any

import torch

from precast.builder.graph.context import FxGraph, FxNode, PassContext, tensor
from precast.builder.graph.match import Add, Bind, Bindings, Cast, Either, Mul, Number, Op, match
from precast.builder.graph.nodes import argument
from precast.builder.passes.graph_pass import graph_pass, node_pass, one_spelling_of_views

aten, ops = (torch.ops.aten, torch.ops.precast)

_X = Cast(Bind("x"))
_DIMS = Bind("dims")
_SQUARE = Either(Op(aten.pow.Tensor_Scalar, _X, 2), Mul(_X, _X))
_NORMALISED = Mul(_X, Op(aten.rsqrt.default, Add(Op(aten.mean.dim, _SQUARE, _DIMS, True), Number("eps"))))
_WEIGHT = Cast(Bind("weight"))

_CENTRED = Op(aten.sub.Tensor, _X, Op(aten.mean.dim, _X, _DIMS, True))
_VARIANCE = Op(aten.mean.dim, Op(aten.pow.Tensor_Scalar, _CENTRED, 2), _DIMS, True)
_STANDARDISED = Mul(_CENTRED, Op(aten.rsqrt.default, Add(_VARIANCE, Number("eps"))))

_NORMS: tuple[tuple[Any, dict[str, Any] | None], ...] = (
    # layer norms first: a norm of centred elements looks like an rms norm of them
    (Cast(Mul(_STANDARDISED, _WEIGHT)), None),
    # then the most particular: a norm without weight is a part of all others
    (Cast(Mul(_NORMALISED, Add(_WEIGHT, 1.0))), {"offset": 1.0, "cast_before_scale": False}),
    (Mul(Bind("weight"), Cast(_NORMALISED)), {"cast_before_scale": True}),
    (Cast(Mul(_NORMALISED, _WEIGHT)), {"cast_before_scale": False}),
    (Cast(_NORMALISED), {"cast_before_scale": True}),
)


@graph_pass(stage="match", version=1, requires=("remove_noops", "normalise_views"), before=(one_spelling_of_views,))
def match_norms(graph: FxGraph, ctx: PassContext) -> bool:
    """x * rsqrt(mean(x^2) + eps) * w -> rms_norm; (x - mean) * rsqrt(var + eps) * w -> layer_norm."""
    changed = False
    for pattern, attributes in _NORMS:
        for node in list(graph.nodes):
            found = _layer_norm(node, ctx) if attributes is None else _find(pattern, node, ctx)
            if found is None:
                continue
            x, weight, eps = found["x"], found.get("weight"), float(found["eps"])
            with ctx.before(node):
                if attributes is None:
                    norm = ctx.call(ops.layer_norm.default, x, weight, found.get("bias"), eps=eps)
                else:
                    norm = ctx.call(ops.rms_norm.default, x, weight, eps=eps, **attributes)
            ctx.replace(node, norm)
            changed = True
    return changed


def _find(pattern: Any, node: FxNode, ctx: PassContext) -> Bindings | None:
    """A match over the last dimension, whose result has x's type, with a weight for each element of it."""
    found = match(pattern, node) if node.op == "call_function" else None
    if found is None:
        return None
    x = tensor(found["x"])
    if tensor(node).dtype != x.dtype or ctx.shape(node) != ctx.shape(x):
        return None
    weight = found.get("weight")
    if weight is not None:
        if not isinstance(weight, FxNode) or tuple(tensor(weight).shape) != tuple(x.shape[-1:]):
            return None
        if tensor(weight).dtype != x.dtype:
            return None
    return found if [dim % x.dim() for dim in found["dims"]] == [x.dim() - 1] else None


def _layer_norm(node: FxNode, ctx: PassContext) -> Bindings | None:
    if node.target is aten.layer_norm.default and not node.kwargs:
        given: Bindings = {"weight": None, "bias": None, "eps": 1e-5}
        given |= dict(zip(("x", "shape", "weight", "bias", "eps"), node.args, strict=False))
        return given if len(given["shape"]) == 1 else None
    return _find(_NORMS[0][0], node, ctx)


@node_pass(stage="match", version=1, requires=("match_norms",))
def fuse_residual_norm(ctx: PassContext, node: FxNode) -> FxNode | None:
    """rms_norm(x + r) -> residual_rms_norm(x, r): one read and one write of the residual stream.

    Legal when x and r have one type, and the norm is the sum's first user.
    """
    if node.target is not torch.ops.precast.rms_norm.default or node.args[1] is None:
        return None
    total = node.args[0]
    if total.target is not aten.add.Tensor or not _one_type(total, ctx) or min(total.users) is not node:
        return None
    fused = ctx.call(torch.ops.precast.residual_rms_norm.default, *total.args, node.args[1], **node.kwargs)
    normed, stream = ctx.item(fused, 0), ctx.item(fused, 1)
    ctx.replace(total, stream)
    return normed


@node_pass(stage="match", version=1, requires=("match_norms",))
def fuse_norm_residual_norm(ctx: PassContext, node: FxNode) -> FxNode | None:
    """residual_rms_norm(r, rms_norm(x)) -> norm_residual_norm(x, r): one launch after a layer's last product.

    Legal when both norms are equal but for their weights, and the inner one is for the sum alone.
    """
    if node.target is not ops.residual_rms_norm.default:
        return None
    for inner, residual in (node.args[:2], node.args[1::-1]):
        if inner.target is not ops.rms_norm.default or inner.args[1] is None or inner is residual:
            continue
        if len(inner.users) == 1 and _rule(inner) == _rule(node):
            x, inner_weight = inner.args
            return ctx.call(ops.norm_residual_norm.default, x, residual, inner_weight, node.args[2], **node.kwargs)
    return None


def _rule(norm: FxNode) -> list[Any]:
    return [argument(norm, name) for name in ("eps", "offset", "cast_before_scale")]


def _one_type(total: FxNode, ctx: PassContext) -> bool:
    if total.kwargs or not all(isinstance(arg, FxNode) for arg in total.args):
        return False
    a, b = (tensor(arg) for arg in total.args)
    return a.dtype == b.dtype and ctx.shape(a) == ctx.shape(b)
