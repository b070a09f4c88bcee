"""Writes into tensors become new tensors: passes may then move and replace nodes by what they compute alone."""

from __future__ import annotations

import operator
from typing import Any

import torch

from precast.builder.graph.context import FxGraph, FxNode, PassContext, tensor
from precast.builder.graph.nodes import argument, is_write
from precast.builder.passes.graph_pass import graph_pass

aten = torch.ops.aten

_ELEMENTWISE = {
    aten.cos.default, aten.sin.default, aten.mul.Tensor, aten.add.Tensor, aten.to.dtype, aten.neg.default,
    aten.to.dtype_layout, aten.to.device, aten._to_copy.default, aten.clone.default, aten.contiguous.default,
}  # fmt: skip


@graph_pass(stage="normalise", version=1)
def remove_self_copies(graph: FxGraph, ctx: PassContext) -> bool:
    """x[0][..., part] = x[k][..., part] -> nothing, where x[0] and x[k] are equal."""
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


@graph_pass(stage="normalise", version=1)
def assemble_copies(graph: FxGraph, ctx: PassContext) -> bool:
    """y = new_empty(...); y[..., :n] = a; y[..., n:] = b -> y = cat([a, b]).

    Legal when the parts cover y without a gap, and nothing reads y before the last of them is written. Runs before
    `remove_writes`, which keeps what a part does not cover.
    """
    changed = False
    for node in list(graph.nodes):
        if node.target is not aten.new_empty.default:
            continue
        copies = _copies(node, ctx)
        if copies is None:
            continue
        last = copies[-1]
        dim, *_ = _extent(last.args[0])
        parts = [copy.args[1] for copy in sorted(copies, key=lambda copy: _extent(copy.args[0]))]
        written = [copy.args[0] for copy in copies]
        with ctx.before(last):
            whole = ctx.call(aten.cat.default, parts, dim)
        ctx.replace(node, whole)
        for part in (*reversed(copies), *written):
            graph.erase_node(part)
        changed = True
    return changed


def _copies(node: FxNode, ctx: PassContext) -> list[FxNode] | None:
    """The writes that make up the whole tensor, in their order, if there are such."""
    copies = []
    readers = []
    for user in node.users:
        users = list(user.users)
        is_part = user.target is aten.slice.Tensor and len(users) == 1 and users[0].target is aten.copy_.default
        if is_part and users[0].args[0] is user:
            copies.append(users[0])
        else:
            readers.append(user)
    if not copies or not _cover(node, copies) or not all(_is_plain(copy, ctx) for copy in copies):
        return None
    order = {other: index for index, other in enumerate(node.graph.nodes)}
    copies.sort(key=order.__getitem__)
    first, last = order[copies[0]], order[copies[-1]]
    others = [n for n, at in order.items() if first < at < last and n not in copies]
    writes = any(is_write(n) for n in others)
    return None if writes or any(order[reader] < last for reader in readers) else copies


def _cover(node: FxNode, copies: list[FxNode]) -> bool:
    """Whether the parts follow each other along one dimension, from its start to its end."""
    parts = sorted(_extent(copy.args[0]) for copy in copies)
    dim, end = parts[0][0], 0
    for other, start, stop, step in parts:
        if other != dim or start != end or step != 1:
            return False
        end = stop
    return end == tensor(node).shape[dim]


def _extent(part: FxNode) -> tuple[int, int, int, int]:
    """Dimension, start, end and step of a slice, none of them negative; an end of -1 where the size is a symbol."""
    whole, dim, start, end, step = (argument(part, name) for name in ("self", "dim", "start", "end", "step"))
    shape = tensor(whole).shape
    dim %= len(shape)
    if not isinstance(shape[dim], int):
        return dim, 0, -1, step
    start, end, _ = slice(start, end).indices(shape[dim])
    return dim, start, end, step


def _is_plain(copy: FxNode, ctx: PassContext) -> bool:
    """Whether the copy neither converts nor repeats, and its result, which is the part, has no use of its own."""
    part, source = copy.args[:2]
    same = isinstance(source, FxNode) and ctx.shape(source) == ctx.shape(part)
    return same and tensor(source).dtype == tensor(part).dtype and not copy.users


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
