"""Finds token embeddings, with the scale that Gemma's models multiply them by."""

from __future__ import annotations

import torch

from precast.builder.graph.context import FxGraph, FxNode, PassContext, tensor
from precast.builder.graph.match import Bind, Bindings, Mul, Op, match
from precast.builder.passes.graph_pass import graph_pass

aten = torch.ops.aten

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
