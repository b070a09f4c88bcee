"""Products with a param become `linear`: GPT-2's Conv1D keeps its weight transposed, and flattens its input."""

from __future__ import annotations

import torch

from precast.builder.graph.context import FxNode, PassContext, tensor
from precast.builder.graph.match import Capture, Op, match
from precast.builder.passes.graph_pass import node_pass
from precast.ir.graph.schema import Transpose

aten = torch.ops.aten

_CONV1D = Op(
    aten.reshape.default,
    Op(aten.addmm.default, Capture("bias"), Op(aten.reshape.default, Capture("x"), Capture("flat")), Capture("weight")),
    Capture("shape"),
)


@node_pass(stage="normalise", version=1, requires=("normalise_views",))
def normalise_linear(ctx: PassContext, node: FxNode) -> FxNode | None:
    """addmm(bias, x.view(-1, in), weight[in, out]).view(..., out) -> linear(x, weight^T, bias); x @ W^T -> linear."""
    if node.target is aten.matmul.default and _is_transposed(node.args[1], ctx):
        return ctx.call(aten.linear.default, node.args[0], node.args[1].args[0])
    found = match(_CONV1D, node)
    if found is None or not ctx.is_param(found["weight"]) or not ctx.is_param(found["bias"]):
        return None
    x, weight = found["x"], found["weight"]
    in_size, out_size = tensor(weight).shape
    if ctx.shape(node) != (*ctx.shape(x)[:-1], out_size):
        return None
    info = ctx.params[weight.name]
    recipe = Transpose(info.recipe, 0, 1)
    transposed = ctx.new_param(weight, info.name + ".transposed", recipe, (out_size, in_size))
    return ctx.call(aten.linear.default, x, transposed, found["bias"])


def _is_transposed(node: FxNode, ctx: PassContext) -> bool:
    """Whether the node is a matrix param with its two dimensions exchanged."""
    if not node.args or not ctx.is_param(node.args[0]) or tensor(node).dim() != 2:
        return False
    exchanged = {aten.transpose.int: ([0, 1], [1, 0]), aten.permute.default: ([[1, 0]],)}.get(node.target, ())
    return list(node.args[1:]) in exchanged
