"""What depends on constants alone is computed once, here."""

from __future__ import annotations

import torch

from precast.builder.graph.context import ConstantInfo, PassContext
from precast.builder.graph.evaluate import NotComputable, evaluate
from precast.builder.graph.fx_types import FxGraph, FxNode
from precast.builder.passes.graph_pass import graph_pass

MAX_ELEMENTS = 1 << 16
"""Larger results stay computations: a bundle is small."""


@graph_pass(stage="normalise", version=1)
def fold_constants(graph: FxGraph, ctx: PassContext) -> bool:
    """f(constants) -> constant, where nothing random, written or of a symbolic size is in it."""
    anchor = next(node for node in graph.nodes if node.op == "placeholder" and node.name == "cu_seqlens")
    foldable: set[FxNode] = set()
    changed = False
    for node in list(graph.nodes):
        if not _is_foldable(node, foldable, ctx):
            continue
        foldable.add(node)
    for node in list(graph.nodes):
        if node in foldable and any(user not in foldable for user in node.users):
            try:
                value = evaluate(node, {}, ctx)
            except (NotComputable, RuntimeError, TypeError):
                continue
            made = ctx.new_input(graph, anchor, f"folded_{len(ctx.constants)}", ctx.empty(value.shape, value.dtype))
            ctx.constants[made.name] = ConstantInfo(made.name, value.contiguous())
            ctx.replace(node, made)
            changed = True
    return changed


def _is_foldable(node: FxNode, foldable: set[FxNode], ctx: PassContext) -> bool:
    value = node.meta.get("val")
    if (
        node.op != "call_function"
        or not isinstance(value, torch.Tensor)
        or node.target is torch.ops.aten.detach_.default
    ):
        return False
    tags = getattr(node.target, "tags", ())
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable or torch.Tag.nondeterministic_seeded in tags:
        return False
    if not all(isinstance(size, int) for size in value.shape) or value.numel() > MAX_ELEMENTS:
        return False
    return all(source in foldable or ctx.constant(source) is not None for source in node.all_input_nodes)
