"""Puts the outputs of linear layers into the order in which they are used, by the order of their weights' rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from precast.builder.graph.context import FxGraph, FxNode, PassContext, tensor
from precast.builder.graph.nodes import argument
from precast.builder.passes.graph_pass import graph_pass, one_spelling_of_views
from precast.ir.graph.schema import Concat, Expr, Recipe, Reshape, Slice, Transpose
from precast.ir.weights import recipes

aten = torch.ops.aten

_RESHAPES = {aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim}
_VIEWS = _RESHAPES | {aten.slice.Tensor, aten.transpose.int, aten.cat.default}
_TOKENS = 3
"""Tokens of the example on which views are told from copies."""


@graph_pass(
    stage="match", version=1, requires=("match_paired_rotary", "fold_param_views"), before=(one_spelling_of_views,)
)
def order_outputs(graph: FxGraph, ctx: PassContext) -> bool:
    """reshape(slice(reshape(linear(x, w)))), ... -> slices of linear(x, the rows of w in the order of their use).

    Heads that have queries, keys and values side by side are copied to take these apart, and pairs of elements to make
    halves of them; a weight is read in any order at no cost. Legal when nothing else takes the product or the weight,
    and each output is used, in one place. A product of which every part is a view stays as it is.
    """
    changed = False
    for linear in list(graph.nodes):
        if linear.target is aten.linear.default and _has_own_params(linear, ctx):
            parts = _parts(linear, ctx)
            if parts:
                _reorder(linear, parts, ctx)
                changed = True
    return changed


def _has_own_params(linear: FxNode, ctx: PassContext) -> bool:
    return all(ctx.is_param(param) and len(param.users) == 1 for param in _params(linear))


def _params(linear: FxNode) -> list[FxNode]:
    bias = argument(linear, "bias")
    return [linear.args[1], *([] if bias is None else [bias])]


def _parts(linear: FxNode, ctx: PassContext) -> dict[FxNode, tuple[int, ...]]:
    """What is computed with of the product, and which of a token's outputs each has, in the order of the first.

    Nothing where all are views of it as it is, or where it can't be made so that they are.
    """
    sizes, place = ctx.shape(linear), _place_of_tokens(ctx.shape(linear))
    count = sizes[-1]
    if place is None or not isinstance(count, int) or math.prod(_without(sizes, place)) != count:
        return {}
    if not all(user.target in _VIEWS for user in linear.users):
        return {}
    product = torch.arange(_TOKENS * count).reshape(_example(sizes))
    found = {linear: product}
    for node in _made_by_views(linear):
        numbers = _numbers(node, found, sizes[place], ctx)
        if numbers is not None:
            found[node] = numbers
    parts = {node: numbers for node, numbers in found.items() if any(user not in found for user in node.users)}
    memory = product.untyped_storage().data_ptr()
    if all(numbers.untyped_storage().data_ptr() == memory for numbers in parts.values()):
        return {}
    orders = {node: tuple(_of_a_token(numbers, node, ctx)) for node, numbers in parts.items()}
    used = sorted(output for order in set(orders.values()) for output in order)
    is_one_each = used == list(range(count)) and all(_can_be_made(ctx.shape(node)) for node in orders)
    return dict(sorted(orders.items(), key=lambda item: item[1][0])) if is_one_each else {}


def _place_of_tokens(sizes: Sequence[Expr]) -> int | None:
    """The one dimension whose size isn't known."""
    places = [dim for dim, size in enumerate(sizes) if not isinstance(size, int)]
    return places[0] if len(places) == 1 else None


def _without(sizes: Sequence[Expr], place: int) -> list[int]:
    return [size for dim, size in enumerate(sizes) if dim != place and isinstance(size, int)]


def _example(sizes: Sequence[Expr]) -> list[int]:
    return [size if isinstance(size, int) else _TOKENS for size in sizes]


def _made_by_views(node: FxNode) -> Sequence[FxNode]:
    """The nodes that are made of it by views and joins, in the graph's order."""
    found, stack = set[FxNode](), [node]
    while stack:
        new = {user for user in stack.pop().users if user.target in _VIEWS} - found
        found |= new
        stack += new
    return sorted(found)


def _numbers(node: FxNode, known: Mapping[FxNode, torch.Tensor], tokens: Expr, ctx: PassContext) -> torch.Tensor | None:
    """Which outputs of the product a view or a join has, for the example; None where it is no such view.

    It is one if the recipe of a param can say the same of rows (`_rows`): tokens stay apart, and in one dimension.
    """
    given = node.args[0] if node.target is aten.cat.default else [node.args[0]]
    place = _place_of_tokens(ctx.shape(node))
    if place is None or ctx.shape(node)[place] != tokens or not all(each in known for each in given):
        return None
    source, before = known[given[0]], _place_of_tokens(ctx.shape(given[0]))
    assert before is not None
    if node.target in _RESHAPES:
        made = source.reshape(_example(ctx.shape(node)))
        is_kept = torch.equal(made.select(place, 0).flatten(), source.select(before, 0).flatten())
        is_apart = torch.equal(made.select(place, -1).flatten(), source.select(before, -1).flatten())
        return made if is_kept and is_apart else None
    if node.target is aten.cat.default:
        return torch.cat([known[each] for each in given], node.args[1]) if node.args[1] != place else None
    if node.target is aten.transpose.int:
        _, i, j = node.args
        return source.transpose(i, j) if before not in (i, j) or abs(i - j) == 1 else None
    _, dim, start, end, step = node.args
    if dim == before or not all(isinstance(number, int) for number in (start, end, step)):
        return None
    is_whole = end == source.shape[dim] and start < step and end % step == 0
    return (
        source.narrow(dim, 0, end)[(*[slice(None)] * dim, slice(start, end, step))] if step == 1 or is_whole else None
    )


def _of_a_token(numbers: torch.Tensor, node: FxNode, ctx: PassContext) -> list[int]:
    place = _place_of_tokens(ctx.shape(node))
    assert place is not None
    found: list[int] = numbers.select(place, 0).flatten().tolist()
    return found


def _can_be_made(sizes: Sequence[Expr]) -> bool:
    """Whether a token's outputs stand after the tokens, or one dimension of them, such as heads, before."""
    place = _place_of_tokens(sizes)
    assert place is not None
    return math.prod(_without(sizes[:place], place)) == 1 or (place == 2 and sizes[0] == 1)


def _reorder(linear: FxNode, parts: dict[FxNode, tuple[int, ...]], ctx: PassContext) -> None:
    """Another product with the outputs in the order of the parts, which are made of it instead."""
    firsts = {order: node for node, order in reversed(parts.items())}
    orders = list(dict.fromkeys(parts.values()))
    with ctx.before(linear):
        params = [_ordered(linear, param, [firsts[order] for order in orders], ctx) for param in _params(linear)]
        product = ctx.call(aten.linear.default, linear.args[0], *params)
        dim, start, slices = tensor(product).dim() - 1, 0, dict[tuple[int, ...], FxNode]()
        for order in orders:
            slices[order] = ctx.call(aten.slice.Tensor, product, dim, start, start + len(order), 1)
            start += len(order)
    for node, order in parts.items():
        with ctx.before(node):
            ctx.replace(node, _shaped(slices[order], ctx.shape(node), ctx))


def _shaped(part: FxNode, sizes: Sequence[Expr], ctx: PassContext) -> FxNode:
    """A slice of the product in these sizes."""
    place = _place_of_tokens(sizes)
    shape = [size if isinstance(size, int) else -1 for size in sizes]
    has_heads_first = place == 2 and shape[1] != 1
    if has_heads_first:
        shape[1], shape[2] = shape[2], shape[1]
    if [size if isinstance(size, int) else -1 for size in ctx.shape(part)] != shape:
        part = ctx.call(aten.reshape.default, part, shape)
    return ctx.call(aten.transpose.int, part, 1, 2) if has_heads_first else part


def _ordered(linear: FxNode, param: FxNode, parts: Sequence[FxNode], ctx: PassContext) -> FxNode:
    """The param with its rows in the order of the parts."""
    info, shape = ctx.params[param.name], tuple(tensor(param).shape)
    rows = [_rows(part, linear, info.recipe, shape[1:], ctx) for part in parts]
    each = tuple(_reshaped(made, (-1, *shape[1:])) for made in rows)
    *path, kind = info.name.split(".")
    name = ".".join((*path, "ordered", kind))
    return ctx.new_param(param, name, each[0] if len(each) == 1 else Concat(each, 0), shape)


def _rows(node: FxNode, linear: FxNode, recipe: Recipe, rest: tuple[int, ...], ctx: PassContext) -> Recipe:
    """A param whose rows are the product's outputs, made as the node is made of those: its shape is that of the
    node's without the tokens, and the `rest` of the param's."""
    sizes = ctx.shape(node)
    place = _place_of_tokens(sizes)
    assert place is not None
    shape = (*_without(sizes, place), *rest)
    if node is linear:
        return _reshaped(recipe, shape)
    if node.target is aten.cat.default:
        parts, dim = node.args
        return Concat(tuple(_rows(part, linear, recipe, rest, ctx) for part in parts), dim - (place < dim))
    inner = _rows(node.args[0], linear, recipe, rest, ctx)
    before = _place_of_tokens(ctx.shape(node.args[0]))
    assert before is not None
    if node.target is aten.transpose.int:
        i, j = (dim - (before < dim) for dim in node.args[1:])
        return inner if before in node.args[1:] else Transpose(inner, min(i, j), max(i, j))
    if node.target is aten.slice.Tensor:
        _, dim, start, _, step = node.args
        at = dim - (before < dim)
        if step == 1:
            return Slice(inner, at, start, shape[at])
        return _reshaped(Slice(_reshaped(inner, (*shape[: at + 1], step, *shape[at + 1 :])), at + 1, start, 1), shape)
    return _reshaped(inner, shape)


def _reshaped(recipe: Recipe, shape: tuple[int, ...]) -> Recipe:
    """The recipe's elements in this shape, of which one size may be -1."""
    found = recipes.shape(recipe)
    inner = recipe.of if isinstance(recipe, Reshape) else recipe
    if -1 in shape:
        rows = math.prod(_without(found, -1)) // math.prod(size for size in shape if size != -1)
        shape = tuple(rows if size == -1 else size for size in shape)
    return inner if recipes.shape(inner) == shape else Reshape(inner, shape)
