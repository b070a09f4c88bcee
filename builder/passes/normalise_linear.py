"""Products with a param become `linear`: GPT-2's Conv1D keeps its weight transposed, and flattens its input."""

from __future__ import annotations

import torch

from precast.builder.context import PassContext, tensor
from precast.builder.fx_types import FxGraph
from precast.builder.match import Capture, Op, match
from precast.builder.pipeline import graph_pass
from precast.builder.sizes import shape_of
from precast.ir.schema import Transpose

aten = torch.ops.aten

_CONV1D = Op(
    aten.reshape.default,
    Op(aten.addmm.default, Capture("bias"), Op(aten.reshape.default, Capture("x"), Capture("flat")), Capture("weight")),
    Capture("shape"),
)


@graph_pass(stage="normalise", version=1, requires=("normalise_views",))
def normalise_linear(graph: FxGraph, ctx: PassContext) -> bool:
    """addmm(bias, x.view(-1, in), weight[in, out]).view(..., out) -> linear(x, weight^T, bias)."""
    changed = False
    for node in list(graph.nodes):
        found = match(_CONV1D, node) if node.op == "call_function" else None
        if found is None or not ctx.is_param(found["weight"]) or not ctx.is_param(found["bias"]):
            continue
        x, weight = found["x"], found["weight"]
        in_size, out_size = tensor(weight).shape
        if shape_of(tensor(node), ctx.symbols) != (*shape_of(tensor(x), ctx.symbols)[:-1], out_size):
            continue
        info = ctx.params[weight.name]
        transposed = ctx.new_param(
            graph, weight, info.name + ".transposed", Transpose(info.recipe, 0, 1), (out_size, in_size)
        )
        with ctx.before(node):
            ctx.replace(node, ctx.call(graph, aten.linear.default, x, transposed, found["bias"]))
        changed = True
    return changed
