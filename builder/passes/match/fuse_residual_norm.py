"""The residual stream is read and written once between two layers' parts."""

from __future__ import annotations

import torch

from precast.builder.graph.context import PassContext, tensor
from precast.builder.graph.fx_types import FxGraph, FxNode
from precast.builder.graph.sizes import shape_of
from precast.builder.passes.graph_pass import graph_pass

aten = torch.ops.aten


@graph_pass(stage="match", version=1, requires=("match_norms",))
def fuse_residual_norm(graph: FxGraph, ctx: PassContext) -> bool:
    """rms_norm(x + r) -> residual_rms_norm(x, r): one read and one write of the residual stream.

    Legal when x and r have one type, and the norm is the sum's first user.
    """
    changed = False
    for norm in list(graph.nodes):
        if norm.target is not torch.ops.precast.rms_norm.default or norm.args[1] is None:
            continue
        total = norm.args[0]
        if total.target is not aten.add.Tensor or not _one_type(total, ctx):
            continue
        if min(total.users) is not norm:
            continue
        with ctx.before(norm):
            fused = ctx.call(
                graph, torch.ops.precast.residual_rms_norm.default, *total.args, norm.args[1], **norm.kwargs
            )
            normed, stream = ctx.item(graph, fused, 0), ctx.item(graph, fused, 1)
        ctx.replace(norm, normed)
        graph.erase_node(norm)
        ctx.replace(total, stream)
        graph.erase_node(total)
        changed = True
    return changed


def _one_type(total: FxNode, ctx: PassContext) -> bool:
    if total.kwargs or not all(isinstance(arg, FxNode) for arg in total.args):
        return False
    a, b = (tensor(arg) for arg in total.args)
    return a.dtype == b.dtype and shape_of(a, ctx.symbols) == shape_of(b, ctx.symbols)
