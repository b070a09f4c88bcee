"""Rotary tables for images and video take parts of three copies of the same frequencies; of text they are one."""

from __future__ import annotations

from typing import Any

import torch

from precast.builder.graph.context import FxGraph, FxNode, PassContext, tensor
from precast.builder.graph.nodes import is_write
from precast.builder.passes.graph_pass import graph_pass

aten = torch.ops.aten

_ELEMENTWISE = {
    aten.cos.default, aten.sin.default, aten.mul.Tensor, aten.add.Tensor, aten.to.dtype, aten.neg.default,
    aten.to.dtype_layout, aten.to.device, aten._to_copy.default, aten.clone.default, aten.contiguous.default,
}  # fmt: skip


@graph_pass(stage="normalise", version=1)
def remove_self_copies(graph: FxGraph, ctx: PassContext) -> bool:
    """x[0][..., part] = x[k][..., part] -> nothing, where x is the same for every k."""
    copies = [node for node in graph.nodes if node.target is aten.copy_.default]
    equal = [node for node in copies if _place(node.args[0], True) == _place(node.args[1], True)]
    written = {_place(node.args[0], True)[0] for node in graph.nodes if _is_written(node) and node not in equal}
    changed = False
    for node in equal:
        same_place = _place(node.args[0], False) == _place(node.args[1], False)
        if same_place or _place(node.args[0], True)[0] not in written:
            ctx.replace(node, node.args[0])
            changed = True
    return changed


def _place(node: FxNode, uniform: bool) -> tuple[Any, ...]:
    """The views by which a node looks at a tensor, and before them the tensor.

    `uniform`: an index into a dimension along which the tensor was made equal is left out.
    """
    views: list[Any] = []
    while node.target in (aten.slice.Tensor, aten.select.int) or _is_written(node):
        if _is_written(node):
            node = node.args[0]
            continue
        source, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
        left_out = uniform and node.target is aten.select.int and dim == 0 and _is_uniform(source)
        views.append((node.target, dim) if left_out else (node.target, *node.args[1:]))
        node = source
    return (node, *views)


def _is_written(node: FxNode) -> bool:
    """Whether the node is its first argument, written: what `x[a:b] += y` then assigns to `x[a:b]`."""
    name = node.target._schema.name if is_write(node) else ""
    return name.startswith("aten::") and name.endswith("_")


def _is_uniform(node: FxNode) -> bool:
    """Whether all that differs in the first index alone is equal."""
    if node.target is aten.expand.default:
        before, after = tensor(node.args[0]), tensor(node)
        return before.dim() < after.dim() or before.shape[0] == 1 or _is_uniform(node.args[0])
    if node.target is aten.slice.Tensor:
        return _is_uniform(node.args[0])
    if node.target in (aten.unsqueeze.default, aten.transpose.int, aten.select.int):
        rank = tensor(node).dim() + (node.target is aten.select.int)
        dims = [dim % rank for dim in node.args[1:] if isinstance(dim, int)]
        touches_first = 0 in (dims[:2] if node.target is aten.transpose.int else dims[:1])
        return not touches_first and _is_uniform(node.args[0])
    if node.target is aten.matmul.default:
        return all(tensor(source).dim() == tensor(node).dim() and _is_uniform(source) for source in node.args)
    if node.target not in _ELEMENTWISE:
        return False
    rank = tensor(node).dim()
    sources = [arg for arg in node.args if isinstance(arg, FxNode)]
    return all(tensor(s).dim() < rank or tensor(s).shape[0] == 1 or _is_uniform(s) for s in sources)
