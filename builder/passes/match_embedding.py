"""Finds token embeddings, with the scale that Gemma's models put behind them."""

from __future__ import annotations

import torch
from torch import fx

from precast.builder.context import PassContext, tensor
from precast.builder.match import Capture, Cast, Either, Mul, Number, Op, match
from precast.builder.pipeline import graph_pass

aten = torch.ops.aten

_LOOKUP = Op(aten.embedding.default, Capture("weight"), Capture("ids"), *[Capture(f"_{i}") for i in range(3)])
_SCALED = Mul(_LOOKUP, Either(Number("scale"), Cast(Capture("scale"))))


@graph_pass(stage="match", version=1, requires=("remove_noops",))
def match_embedding(graph: fx.Graph, ctx: PassContext) -> bool:
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
                new = ctx.call(
                    graph, torch.ops.precast.embedding.default, found["ids"], found["weight"], scale=scale
                )
            ctx.replace(node, new)
            changed = True
    return changed


def _scale(found: dict[str, object], ctx: PassContext) -> float | None:
    scale = found.get("scale", 1.0)
    dtype = tensor(found["weight"]).dtype
    if isinstance(scale, (int, float)):
        return float(scale) if float(torch.tensor(scale, dtype=dtype)) == scale else None
    constant = ctx.constant(scale)
    if constant is None or constant.numel() != 1:
        return None
    return float(constant.to(dtype))
