"""The language model's head is computed only for the rows that somebody wants."""

from __future__ import annotations

from typing import Any

import torch

from precast.builder.graph.context import FxGraph, FxNode, PassContext, tensor
from precast.builder.graph.nodes import placeholder
from precast.builder.passes.graph_pass import all_have_caches, graph_pass

aten = torch.ops.aten

_ROW_BY_ROW = {
    # ops after the head that treat each row by itself: soft caps, scales, conversions
    aten.mul.Tensor, aten.div.Tensor, aten.tanh.default, aten.to.dtype, aten.add.Tensor, aten.sub.Tensor,
    aten.linear.default,
}  # fmt: skip


@graph_pass(stage="plan", version=1, requires=("insert_caches",), before=(all_have_caches,))
def gather_logits(graph: FxGraph, ctx: PassContext) -> bool:
    """head(x) -> head(gather_rows(x, logit_rows)), also through soft caps and scales after the head."""
    (output,) = [node for node in graph.nodes if node.op == "output"]
    logits = output.args[0]["logits"]
    path = _path(logits)
    first = path[-1] if path else None
    rows = ctx.new_symbol("R")
    place = ctx.new_input(placeholder(graph, "input_ids"), "logit_rows", ctx.empty((rows,), torch.int64))
    source = logits if first is None else first.args[0]
    with ctx.before(output if first is None else first):
        gathered = ctx.call(torch.ops.precast.gather_rows.default, source, place)
    if first is None:
        output.args = ({**output.args[0], "logits": gathered},)
        return True
    first.replace_input_with(source, gathered)
    for node in reversed(path):
        node.meta["val"] = ctx.fake(node.target, node.args, node.kwargs)
    return True


def _path(logits: FxNode) -> list[FxNode]:
    """The nodes from the logits back to the head's product, as far as each has one tensor of rows."""
    path: list[FxNode] = []
    node: Any = logits
    while isinstance(node, FxNode) and node.target in _ROW_BY_ROW and _one_source(node):
        path.append(node)
        if node.target is aten.linear.default:
            return path
        node = node.args[0]
    return []


def _one_source(node: FxNode) -> bool:
    others = [arg for arg in node.args[1:] if isinstance(arg, FxNode) and tensor(arg).dim() > 1]
    only_user = len(node.users) == 1
    return only_user and (node.target is aten.linear.default or not others)
