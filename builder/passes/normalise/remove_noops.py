"""Removes what changes nothing: aliases, dropout, conversions to the same dtype."""

from __future__ import annotations

import torch

from precast.builder.graph.context import FxNode, PassContext, tensor
from precast.builder.passes.graph_pass import node_pass
from precast.builder.passes.invariants import CONVERSIONS

aten = torch.ops.aten

_SAME_ELEMENTS = CONVERSIONS | {
    aten.alias.default, aten.contiguous.default, aten.clone.default, aten.detach.default, aten.detach_.default,
    aten.dropout.default, aten.lift_fresh_copy.default, aten.slice.Tensor, aten.expand.default, aten.to.dtype,
    aten.view.default, aten.reshape.default,
}  # fmt: skip


@node_pass(stage="normalise", version=1)
def remove_noops(ctx: PassContext, node: FxNode) -> FxNode | None:
    """x.alias(), x.to(x.dtype), x[:], x.view(x.shape), x * 1.0 -> x."""
    return node.args[0] if _is_noop(node, ctx) else None


def _is_noop(node: FxNode, ctx: PassContext) -> bool:
    if not node.args or not isinstance(node.args[0], FxNode) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    if node.target is aten.dropout.default:
        return node.args[2] is False
    identity = node.target in _SAME_ELEMENTS or (
        node.target is aten.mul.Tensor and type(node.args[1]) in (int, float) and node.args[1] == 1
    )
    if not identity:
        return False
    before, after = tensor(node.args[0]), tensor(node)
    return before.dtype == after.dtype and ctx.shape(before) == ctx.shape(after)
