"""Replaces rare ops by ops of the op table that say the same, and removes views that undo each other."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.fx.node import map_arg

from precast.builder.graph.context import FxNode, PassContext, tensor
from precast.builder.graph.nodes import argument
from precast.builder.passes.graph_pass import NodeFunction, node_pass, one_spelling_of_views

aten = torch.ops.aten


@node_pass(stage="match", version=1)
def normalise_spelling(ctx: PassContext, node: FxNode) -> FxNode | None:
    """stack -> cat; repeat, repeat_interleave -> expand; table[ids] -> embedding; ..."""
    spell = _SPELLINGS.get(node.target)
    return spell(ctx, node) if spell else None


def _stack(ctx: PassContext, node: FxNode) -> FxNode:
    dim = argument(node, "dim") % tensor(node).dim()
    parts = [ctx.call(aten.unsqueeze.default, part, dim) for part in node.args[0]]
    return ctx.call(aten.cat.default, parts, dim)


def _repeat(ctx: PassContext, node: FxNode) -> FxNode | None:
    """Whole copies, one after another: a new dimension before each repeated one, merged into it."""
    x, repeats = node.args
    while tensor(x).dim() < len(repeats):
        x = ctx.call(aten.unsqueeze.default, x, 0)
    for dim, count in enumerate(repeats):
        if isinstance(count, int) and count == 1:
            continue
        copies = _copies(ctx, x, dim, count, before=True)
        if copies is None:
            return None
        x = copies
    return x


def _repeat_interleave(ctx: PassContext, node: FxNode) -> FxNode | None:
    """Each element several times in a row: a new dimension after it, merged into it."""
    (x, count), dim = node.args[:2], argument(node, "dim")
    return None if dim is None else _copies(ctx, x, dim % tensor(x).dim(), count, before=False)


def _copies(ctx: PassContext, x: FxNode, dim: int, count: Any, *, before: bool) -> FxNode | None:
    sizes = list(tensor(x).shape)
    wide = ctx.call(aten.unsqueeze.default, x, dim if before else dim + 1)
    spread = [-1] * (len(sizes) + 1)
    spread[dim if before else dim + 1] = count
    wide = ctx.call(aten.expand.default, wide, spread)
    if isinstance(sizes[dim], int) and sizes[dim] == 1:
        return ctx.call(aten.squeeze.dim, wide, dim + 1 if before else dim)
    merged = [size if isinstance(size, int) else -1 for size in sizes]
    merged[dim] = sizes[dim] * count if isinstance(sizes[dim], int) and isinstance(count, int) else -1
    return ctx.call(aten.reshape.default, wide, merged) if merged.count(-1) < 2 else None


def _last_two(ctx: PassContext, node: FxNode) -> FxNode:
    rank = tensor(node).dim()
    return ctx.call(aten.transpose.int, node.args[0], rank - 2, rank - 1)


def _index(ctx: PassContext, node: FxNode) -> FxNode | None:
    """Rows of a table by one tensor of indices; other ways to index have no other spelling."""
    table, indices = node.args
    part = _index_along(ctx, table, indices)
    if part is not None or len(indices) > 1:
        return part
    if tensor(table).dim() > 2 or tensor(indices[0]).dtype not in (torch.int64, torch.int32):
        return None
    known = ctx.constant(indices[0])
    if known is not None and bool((known < 0).any()):
        return None  # counted from the end, which an embedding doesn't know
    is_list = tensor(table).dim() == 1
    rows = ctx.call(aten.unsqueeze.default, table, 1) if is_list else table
    found = ctx.call(aten.embedding.default, rows, indices[0])
    return ctx.call(aten.squeeze.dim, found, tensor(found).dim() - 1) if is_list else found


def _index_along(ctx: PassContext, table: FxNode, indices: Any) -> FxNode | None:
    """x[..., [i]] with one constant index along one dimension -> a slice of length 1."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    values = ctx.constant(given[0][1]) if len(given) == 1 else None
    if values is None or values.shape != (1,) or values.dtype not in (torch.int64, torch.int32):
        return None
    dim, at = given[0][0], int(values[0])
    size = tensor(table).shape[dim]
    at = at + size if at < 0 and isinstance(size, int) else at
    return ctx.call(aten.slice.Tensor, table, dim, at, at + 1, 1) if at >= 0 else None


def _index_select(ctx: PassContext, node: FxNode) -> FxNode | None:
    table, dim, indices = node.args
    return ctx.call(aten.embedding.default, table, indices) if dim == 0 and tensor(table).dim() == 2 else None


def _concatenate(ctx: PassContext, node: FxNode) -> FxNode:
    return ctx.call(aten.cat.default, node.args[0], argument(node, "dim") % tensor(node).dim())


def _item(ctx: PassContext, node: FxNode) -> FxNode | None:
    source, index = node.args
    if not isinstance(source, FxNode) or source.target is not aten.broadcast_tensors.default:
        return None
    return _expanded(ctx, source.args[0][index], source.args[0])


def _expanded(ctx: PassContext, x: FxNode, others: Sequence[FxNode]) -> FxNode:
    """`x` in the shape that it and `others` have in common; a size over symbols is asked of the one that has it."""
    rank = max(tensor(other).dim() for other in (x, *others))
    sizes: list[Any] = []
    for dim in range(-rank, 0):
        if dim >= -tensor(x).dim() and not _is_one(tensor(x).shape[dim]):
            sizes.append(-1)
            continue
        wide = (other for other in others if dim >= -tensor(other).dim() and not _is_one(tensor(other).shape[dim]))
        other = next(wide, None)
        size: Any = 1 if other is None else tensor(other).shape[dim]
        if not isinstance(size, int):
            size = ctx.call(aten.sym_size.int, other, tensor(other).dim() + dim)
        sizes.append(size)
    return x if sizes == [-1] * tensor(x).dim() else ctx.call(aten.expand.default, x, sizes)


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _softmax(ctx: PassContext, node: FxNode) -> FxNode | None:
    x, dim, half_to_float = node.args
    return None if half_to_float else ctx.call(aten.softmax.int, x, dim)


def _clamp(ctx: PassContext, node: FxNode) -> FxNode:
    x, low, high = (argument(node, name) for name in ("self", "min", "max"))
    raised: FxNode = x if low is None else ctx.call(aten.maximum.default, x, low)
    return raised if high is None else ctx.call(aten.minimum.default, raised, high)


def _full_like(value: float | None) -> NodeFunction:
    def spell(ctx: PassContext, node: FxNode) -> FxNode | None:
        filling = node.args[1] if value is None else value
        plain = node.args == (node.args[0], *(() if value is not None else (filling,)))
        if not plain or set(node.kwargs) - {"dtype", "device", "layout", "pin_memory", "memory_format"}:
            return None
        if node.target is aten.full_like.default and not node.kwargs:
            return None
        like, dtype = node.args[0], tensor(node).dtype
        like = like if tensor(like).dtype == dtype else ctx.call(aten.to.dtype, like, dtype)
        return ctx.call(aten.full_like.default, like, filling)

    return spell


_SPELLINGS: dict[Any, NodeFunction] = {
    aten.stack.default: _stack,
    aten.repeat.default: _repeat,
    aten.repeat_interleave.self_int: _repeat_interleave,
    aten.mT.default: _last_two,
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
    aten.concatenate.default: _concatenate,
    aten.concat.default: _concatenate,
    aten.expand_as.default: lambda ctx, node: _expanded(ctx, node.args[0], [node.args[1]]),
    aten._softmax.default: _softmax,
    aten.clamp.Tensor: _clamp,
    aten.full_like.default: _full_like(None),
    aten.zeros_like.default: _full_like(0),
    aten.ones_like.default: _full_like(1),
    operator.getitem: _item,
}


@node_pass(stage="match", version=1, requires=("normalise_views", "match_paired_rotary"))
def join_slices(ctx: PassContext, node: FxNode) -> FxNode | None:
    """cat(x[..., :a], x[..., a:]) -> x; neighbours among other parts, or of a part of x -> one slice."""
    if node.target is not aten.cat.default:
        return None
    parts, dim = node.args
    joined: list[FxNode | _Part] = []
    for part in parts:
        new = _part(part, dim)
        last = joined[-1] if joined else None
        if isinstance(last, _Part) and new is not None and (last.whole, last.end) == (new.whole, new.start):
            joined[-1] = last._replace(node=None, end=new.end)
        else:
            joined.append(part if new is None else new)
    if len(joined) == len(parts):
        return None
    left = [part.made(ctx, dim) if isinstance(part, _Part) else part for part in joined]
    return left[0] if len(left) == 1 else ctx.call(aten.cat.default, left, dim)


class _Part(NamedTuple):
    """Elements `start` to `end` of a dimension of `whole`; `node` is what gives them, if something does."""

    node: FxNode | None
    whole: FxNode
    start: int
    end: int

    def made(self, ctx: PassContext, dim: int) -> FxNode:
        if self.node is not None:
            return self.node
        size = tensor(self.whole).shape[dim]
        if self.start == 0 and isinstance(size, int) and self.end == size:
            return self.whole
        return ctx.call(aten.slice.Tensor, self.whole, dim, self.start, self.end, 1)


def _part(node: FxNode, dim: int) -> _Part | None:
    """The node as elements side by side of a dimension of another; None where it is no such slice."""
    if node.target is not aten.slice.Tensor or len(node.args) < 5:
        return None
    whole, of_dim, start, end, step = node.args
    is_part = of_dim == dim and step == 1 and isinstance(start, int) and isinstance(end, int)
    return _Part(node, whole, start, end) if is_part else None


@node_pass(stage="match", version=2, requires=("match_rotary", "match_norms"))
def cancel_transposes(ctx: PassContext, node: FxNode) -> FxNode | None:
    """x.transpose(a, b).transpose(a, b) -> x, also through an op on another dimension between the two; and through
    slices and pointwise ops, f(x.transpose(a, b), ...).transpose(a, b) -> f(x, ...), where nothing else takes f; and
    (w @ x.transpose(1, 2)).transpose(1, 2) -> linear(x, w)."""
    if node.target is not aten.transpose.int:
        return None
    dims, between = set(node.args[1:]), node.args[0]
    through = _leaves_alone(between, dims)
    inner = between.args[0] if through else between
    if inner.target is aten.transpose.int and set(inner.args[1:]) == dims:
        source: FxNode = inner.args[0]
        return ctx.call(between.target, source, *between.args[1:], **between.kwargs) if through else source
    if between.target is aten.matmul.default and dims == {1, 2}:
        weight, x = between.args
        is_linear = tensor(weight).dim() == 2 and tensor(x).dim() == 3 and _is_exchanged(x, dims, ctx)
        return ctx.call(aten.linear.default, _exchanged(ctx, x, dims), weight) if is_linear else None
    return _exchanged(ctx, between, dims) if _is_exchanged(between, dims, ctx) else None


def _is_exchanged(node: FxNode, dims: set[int], ctx: PassContext) -> bool:
    """Whether the node is made of tensors with these dimensions exchanged, by ops that don't care."""
    if node.target is aten.transpose.int:
        return set(node.args[1:]) == dims
    if node.target is aten.slice.Tensor:
        return _is_exchanged(node.args[0], dims, ctx)
    if node.target not in _POINTWISE or len(node.users) > 1:
        return False
    shape = ctx.shape(node)
    return all(ctx.shape(each) == shape and _is_exchanged(each, dims, ctx) for each in node.all_input_nodes)


def _exchanged(ctx: PassContext, node: FxNode, dims: set[int]) -> FxNode:
    """What `_is_exchanged` is true of, before that."""
    if node.target is aten.transpose.int:
        return cast("FxNode", node.args[0])
    if node.target is aten.slice.Tensor:
        of, dim, *bounds = node.args
        (other,) = dims - {dim} if dim in dims else {dim}
        return ctx.call(aten.slice.Tensor, _exchanged(ctx, of, dims), other, *bounds)
    args, kwargs = map_arg((node.args, node.kwargs), lambda arg: _exchanged(ctx, cast("FxNode", arg), dims))
    return ctx.call(node.target, *args, **kwargs)


def _leaves_alone(node: FxNode, dims: set[int]) -> bool:
    """Whether the op does the same to each element of these dimensions."""
    if node.target is aten.slice.Tensor:
        return node.args[1] not in dims
    return node.target is torch.ops.precast.rms_norm.default and tensor(node).dim() - 1 not in dims


_POINTWISE = {aten.to.dtype, aten.silu.default, aten.sigmoid.default, aten.mul.Tensor, aten.add.Tensor}


@node_pass(stage="match", version=1, requires=("match_norms",), before=(one_spelling_of_views,))
def keep_heads_apart(ctx: PassContext, node: FxNode) -> FxNode | None:
    """f(x.reshape(-1, D)) -> f(x).reshape(-1, D), and x.reshape(-1, D).reshape(x.shape) -> x.

    Heads of a part of a product don't lie as rows at one distance, so that one dimension of all tokens' heads is a
    copy; ops over rows take them as they lie. Legal for ops that compute each row from rows at the same place.
    """
    if node.target is aten.reshape.default:
        inner = node.args[0]
        is_back = inner.target is aten.reshape.default and ctx.shape(inner.args[0]) == ctx.shape(node)
        return inner.args[0] if is_back and _merges_heads(inner, ctx) else None
    if node.target not in _POINTWISE and node.target is not torch.ops.precast.rms_norm.default:
        return None
    rows = [arg for arg in node.all_input_nodes if tensor(arg).dim() > 1]
    if not rows or not all(_merges_heads(each, ctx) for each in rows):
        return None
    if len({ctx.shape(each.args[0]) for each in rows}) > 1:
        return None
    args, kwargs = map_arg((node.args, node.kwargs), lambda arg: arg.args[0] if arg in rows else arg)
    return ctx.call(aten.reshape.default, ctx.call(node.target, *args, **kwargs), rows[0].args[1])


def _merges_heads(node: FxNode, ctx: PassContext) -> bool:
    """Whether two or more dimensions of rows become one, and the rows stay."""
    if node.target is not aten.reshape.default or tensor(node).dim() != 2:
        return False
    *before, size = ctx.shape(node.args[0])
    return size == ctx.shape(node)[1] and sum(each != 1 for each in before) > 1
