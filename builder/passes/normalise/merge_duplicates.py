"""Computes equal things once, within a layer: across layers it would tie the layers' blocks together."""

from __future__ import annotations

from typing import Any

import torch

from precast.builder.graph.context import FxGraph, FxNode, PassContext
from precast.builder.graph.nodes import is_write, layer_of
from precast.builder.passes.graph_pass import graph_pass


@graph_pass(stage="normalise", version=1)
def merge_duplicates(graph: FxGraph, ctx: PassContext) -> bool:
    """Two calls of one pure op with the same arguments in the same layer -> one."""
    changed = False
    seen: dict[Any, FxNode] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or is_write(node):
            continue
        key = (node.target, _frozen(node.args), _frozen(node.kwargs), layer_of(node))
        first = seen.setdefault(key, node)
        if first is not node:
            ctx.replace(node, first)
            changed = True
    return changed


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, dict):
        return tuple(sorted((key, _frozen(item)) for key, item in value.items()))
    return (type(value), str(value) if isinstance(value, torch.SymInt) else value)
