"""What depends on constants alone is computed once, here."""

from __future__ import annotations

import torch

from precast.builder.graph.context import FxGraph, FxNode, PassContext
from precast.builder.graph.evaluate import NotComputable, evaluate
from precast.builder.graph.nodes import is_write, placeholder
from precast.builder.passes.graph_pass import graph_pass

MAX_ELEMENTS = 1 << 16
"""Larger results stay computations: a bundle is small."""


@graph_pass(stage="normalise", version=1)
def fold_constants(graph: FxGraph, ctx: PassContext) -> bool:
    """f(constants) -> constant, where nothing random, written or of a symbolic size is in it."""
    anchor = placeholder(graph, "cu_seqlens")
    foldable: set[FxNode] = set()
    changed = False
    for node in graph.nodes:
        if _is_foldable(node, foldable, ctx):
            foldable.add(node)
    for node in list(graph.nodes):
        if node in foldable and any(user not in foldable for user in node.users):
            try:
                value = evaluate(node, {}, ctx)
            except (NotComputable, RuntimeError, TypeError):  # the CPU can't compute it: it stays in the graph
                continue
            ctx.replace(node, ctx.new_constant(anchor, f"folded_{len(ctx.constants)}", value.contiguous()))
            changed = True
    return changed


def _is_foldable(node: FxNode, foldable: set[FxNode], ctx: PassContext) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if is_write(node) or node.target is torch.ops.aten.detach_.default:
        return False
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    if not all(isinstance(size, int) for size in value.shape) or value.numel() > MAX_ELEMENTS:
        return False
    return all(source in foldable or ctx.constant(source) is not None for source in node.all_input_nodes)
