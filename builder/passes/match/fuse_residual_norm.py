"""The residual stream is read and written once between two layers' parts."""

from __future__ import annotations

import torch

from precast.builder.graph.context import FxNode, PassContext, tensor
from precast.builder.passes.graph_pass import node_pass

aten = torch.ops.aten


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


def _one_type(total: FxNode, ctx: PassContext) -> bool:
    if total.kwargs or not all(isinstance(arg, FxNode) for arg in total.args):
        return False
    a, b = (tensor(arg) for arg in total.args)
    return a.dtype == b.dtype and ctx.shape(a) == ctx.shape(b)
