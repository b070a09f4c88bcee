"""Writes into all parts of a new tensor become the tensor of these parts, without the memory that they were made in."""

from __future__ import annotations

import torch

from precast.builder.graph.context import FxGraph, FxNode, PassContext, tensor
from precast.builder.graph.nodes import argument, is_write
from precast.builder.passes.graph_pass import graph_pass

aten = torch.ops.aten


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
        dim, *_ = _part(last.args[0])
        parts = [copy.args[1] for copy in sorted(copies, key=lambda copy: _part(copy.args[0]))]
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
    parts = sorted(_part(copy.args[0]) for copy in copies)
    dim, end = parts[0][0], 0
    for other, start, stop, step in parts:
        if other != dim or start != end or step != 1:
            return False
        end = stop
    return end == tensor(node).shape[dim]


def _part(part: FxNode) -> tuple[int, int, int, int]:
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
