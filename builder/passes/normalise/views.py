"""One spelling for each view of a tensor, so that patterns need to know only one; views that change nothing go."""

from __future__ import annotations

import operator
from typing import Any

import torch

from precast.builder.graph.context import FxGraph, FxNode, PassContext, tensor
from precast.builder.graph.nodes import argument
from precast.builder.passes.graph_pass import CONVERSIONS, VIEWS, graph_pass, node_pass, one_spelling_of_views

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


_RESHAPES = VIEWS | {aten.reshape.default}
_CONVERSIONS = CONVERSIONS | {aten.to.dtype}
_SPLITS = {
    aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default, aten.chunk.default, aten.tensor_split.sections,
}  # fmt: skip
_DIMS = {
    # op: the positions of its dimension arguments
    aten.slice.Tensor: (1,), aten.select.int: (1,), aten.unsqueeze.default: (1,), aten.squeeze.dim: (1,),
    aten.transpose.int: (1, 2), aten.cat.default: (1,), aten.stack.default: (1,),
}  # fmt: skip


@graph_pass(stage="normalise", version=1, after=(one_spelling_of_views,))
def normalise_views(graph: FxGraph, ctx: PassContext) -> bool:
    """view, flatten, ... -> reshape; type_as, ... -> to; split, chunk, unbind -> slice, select; dims not negative."""
    changed = False
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _RESHAPES:
            changed |= _retarget(node, aten.reshape.default, (node.args[0], _sizes(node)))
        elif node.target in _CONVERSIONS:
            changed |= _retarget(node, aten.to.dtype, (node.args[0], tensor(node).dtype))
        elif node.target is operator.getitem and node.args[0].target in _SPLITS | {aten.unbind.int}:
            _replace_item(node, ctx)
            changed = True
        elif node.target is aten.numpy_T.default:
            changed |= _retarget(node, aten.permute.default, (node.args[0], list(range(tensor(node).dim()))[::-1]))
        elif node.target is aten.t.default:
            changed |= _retarget(node, aten.transpose.int, (node.args[0], 0, 1))
        elif node.target in _DIMS:
            changed |= _positive_dims(node)
            changed |= node.target is aten.cat.default and _drop_empty(node, ctx)
    return changed


def _retarget(node: FxNode, target: Any, args: tuple[Any, ...]) -> bool:
    if node.target is target and node.args == args and not node.kwargs:
        return False
    node.target, node.args, node.kwargs = target, args, {}
    return True


def _sizes(node: FxNode) -> Any:
    """The shape argument as it stands, or -1 for the one symbolic size."""
    if node.target in (aten.view.default, aten.reshape.default, aten._unsafe_view.default):
        return node.args[1]
    return [size if isinstance(size, int) else -1 for size in tensor(node).shape]


def _positive_dims(node: FxNode) -> bool:
    if node.target is aten.cat.default or node.target is aten.stack.default:
        rank = tensor(node).dim()
    else:
        rank = tensor(node.args[0]).dim() + (node.target is aten.unsqueeze.default)
    args = list(node.args)
    if len(args) == 1 and node.target in (aten.cat.default, aten.stack.default):
        args.append(0)
    if node.target is aten.slice.Tensor:
        args += [None, None, 1][len(args) - 2 :]
        args[2], args[3] = _bounds(args, tensor(node.args[0]).shape[args[1] % rank])
    for position in _DIMS[node.target]:
        args[position] %= rank
    changed = tuple(args) != node.args
    node.args = tuple(args)
    return changed


def _drop_empty(node: FxNode, ctx: PassContext) -> bool:
    """Parts without elements add nothing; one part alone is the whole."""
    parts, dim = node.args
    kept = [part for part in parts if not (isinstance(n := tensor(part).shape[dim], int) and n == 0)]
    if len(kept) == 1:
        ctx.replace(node, kept[0])
    elif len(kept) < len(parts):
        node.args = (kept, dim)
    return len(kept) < len(parts)


def _bounds(args: list[Any], size: Any) -> tuple[Any, Any]:
    """Start and end as non-negative numbers where the dimension's size is a number."""
    start, end = args[2] or 0, args[3]
    if isinstance(size, int):
        end = size if end is None else end
        if isinstance(start, int) and isinstance(end, int):
            start = max(start + size, 0) if start < 0 else min(start, size)
            end = max(end + size, 0) if end < 0 else min(end, size)
    return start, end


def _replace_item(item: FxNode, ctx: PassContext) -> None:
    split, index = item.args
    source, parts = split.args[0], split.meta["val"]
    dim = argument(split, "dim") % tensor(source).dim()
    with ctx.before(item):
        if split.target is aten.unbind.int:
            new = ctx.call(aten.select.int, source, dim, index)
        else:
            start = sum(part.shape[dim] for part in parts[:index])
            new = ctx.call(aten.slice.Tensor, source, dim, start, start + parts[index].shape[dim], 1)
    ctx.replace(item, new)
