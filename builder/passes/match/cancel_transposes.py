"""Two exchanges of the same dimensions, one after the other, are none."""

from __future__ import annotations

import torch

from precast.builder.graph.context import FxNode, PassContext, tensor
from precast.builder.passes.graph_pass import node_pass

aten = torch.ops.aten


@node_pass(stage="match", version=1, requires=("match_rotary", "match_norms"))
def cancel_transposes(ctx: PassContext, node: FxNode) -> FxNode | None:
    """x.transpose(a, b).transpose(a, b) -> x, also through an op on another dimension between the two."""
    if node.target is not aten.transpose.int:
        return None
    dims, between = set(node.args[1:]), node.args[0]
    through = _leaves_alone(between, dims)
    inner = between.args[0] if through else between
    if inner.target is not aten.transpose.int or set(inner.args[1:]) != dims:
        return None
    source: FxNode = inner.args[0]
    return ctx.call(between.target, source, *between.args[1:], **between.kwargs) if through else source


def _leaves_alone(node: FxNode, dims: set[int]) -> bool:
    """Whether the op does the same to each element of these dimensions."""
    if node.target is aten.slice.Tensor:
        return node.args[1] not in dims
    return node.target is torch.ops.precast.rms_norm.default and tensor(node).dim() - 1 not in dims
