"""Writes into tensors become new tensors: passes may then move and replace nodes by what they compute alone."""

from __future__ import annotations

import operator
from typing import Any

import torch

from precast.builder.graph.context import FxGraph, FxNode, PassContext, tensor
from precast.builder.graph.nodes import argument, is_write
from precast.builder.passes.graph_pass import graph_pass

aten = torch.ops.aten


@graph_pass(stage="normalise", version=1)
def remove_writes(graph: FxGraph, ctx: PassContext) -> bool:
    """x.div_(y), then uses of x -> z = x.div(y), then uses of z.

    Legal when nothing that shares x's memory is read after the write by another name, and x is no input. Runs before
    `remove_noops`, which would make one of a tensor and its copy.
    """
    changed = False
    for node in list(graph.nodes):
        pure = _pure(node)
        if pure is None:
            continue
        written: FxNode = node.args[0]
        if not _owns(written, node):
            changed |= _write_part(ctx, node, pure)
            continue
        with ctx.before(node):
            new = _written(ctx, node, pure)
        later = _following(node)
        written.replace_all_uses_with(new, delete_user_cb=later.__contains__)
        ctx.replace(node, new)
        changed = True
    return changed


def _written(ctx: PassContext, node: FxNode, pure: Any) -> FxNode:
    """What the write leaves in its first argument, in that one's dtype."""
    args: tuple[Any, ...] = tuple(node.args)
    new = ctx.call(pure, *args, **node.kwargs)
    dtype = tensor(args[0]).dtype
    return new if tensor(new).dtype == dtype else ctx.call(aten.to.dtype, new, dtype)


def _write_part(ctx: PassContext, node: FxNode, pure: Any) -> bool:
    """x[a:b].add_(y), then uses of x -> z = cat(x[:a], x[a:b] + y, x[b:]), then uses of z."""
    part: FxNode = node.args[0]
    if part.target is not aten.slice.Tensor or not _owns(part.args[0], node, but=part):
        return False
    base, dim, start, end, step = (argument(part, name) for name in ("self", "dim", "start", "end", "step"))
    size = tensor(base).shape[dim]
    if step != 1 or not isinstance(size, int):
        return False
    start, end, _ = slice(start, end).indices(size)
    later = _following(node)
    with ctx.before(node):
        new = _written(ctx, node, pure)
        before = [ctx.call(aten.slice.Tensor, base, dim, 0, start)] if start else []
        after = [ctx.call(aten.slice.Tensor, base, dim, end, size)] if end < size else []
        whole = ctx.call(aten.cat.default, [*before, new, *after], dim)
    base.replace_all_uses_with(whole, delete_user_cb=later.__contains__)
    part.replace_all_uses_with(new, delete_user_cb=later.__contains__)
    ctx.replace(node, new)
    return True


def _pure(node: FxNode) -> Any:
    """The op that computes what this one writes into its first argument, if it is such an op."""
    if node.op != "call_function" or not is_write(node):
        return None
    schema = node.target._schema
    space, _, name = schema.name.partition("::")
    written = [arg.name for arg in schema.arguments if arg.alias_info is not None and arg.alias_info.is_write]
    if space != "aten" or not name.endswith("_") or written != [schema.arguments[0].name]:
        return None
    packet = getattr(aten, name.removesuffix("_"), None)
    pure = getattr(packet, schema.overload_name or "default", None)
    if pure is None or [arg.name for arg in pure._schema.arguments] != [arg.name for arg in schema.arguments]:
        return None
    return pure


def _owns(written: FxNode, node: FxNode, but: FxNode | None = None) -> bool:
    """Whether from `node` on, what it writes is read as `written` or as its result (or as `but`), by no other name."""
    root = _root(written)
    if root.op != "call_function":
        return False
    later = _following(node)
    sharing = [other for other in _sharing(root) if other not in (written, node, but) and other not in later]
    return not any(user in later for other in sharing for user in other.users)


def _root(node: FxNode) -> FxNode:
    """The node that made the memory that `node` is a view of."""
    while node.op == "call_function" and _is_view(node):
        node = node.args[0]
    return node


def _sharing(root: FxNode) -> list[FxNode]:
    """The node and all views of it."""
    found = [root]
    for node in found:
        found += [user for user in node.users if _is_view(user) and user.args[0] is node and user not in found]
    return found


def _is_view(node: FxNode) -> bool:
    """Whether the result may share memory with the first argument: picking one of several results counts as well."""
    if node.target is operator.getitem:
        return _returns_views(node.args[0])
    return node.target is aten.dropout.default or _returns_views(node)


def _returns_views(node: FxNode) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


def _following(node: FxNode) -> set[FxNode]:
    """All nodes after this one."""
    found = set()
    following: Any = node.next
    while following.op != "root":
        found.add(following)
        following = following.next
    return found
