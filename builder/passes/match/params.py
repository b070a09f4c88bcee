"""Joins params that multiply one input, and makes what is done to params alone a part of their recipes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from precast.builder.graph.context import FxGraph, FxNode, PassContext, tensor
from precast.builder.graph.nodes import argument, layer_of, placeholder
from precast.builder.graph.rounding import rounding_of
from precast.builder.passes.graph_pass import graph_pass, node_pass, one_spelling_of_views
from precast.builder.weights.kept import fit_together
from precast.ir.graph.schema import Cast, Concat, Recipe, Reshape, Slice, Transpose

aten = torch.ops.aten


_ALIGNED = 8
"""Outputs of a product are joined in multiples of it: 16 bytes of a 16-bit dtype, which GPUs read and write at once."""


@graph_pass(stage="match", version=3, requires=("normalise_linear", "fuse_gated_activation"))
def fuse_projections(graph: FxGraph, ctx: PassContext) -> bool:
    """linear(x, q), linear(x, k), linear(x, v) of one layer -> slices of linear(x, concat(q, k, v)).

    A product whose outputs are no multiple of 8 stays on its own: joined, it would leave the rows of the result, and
    what lies after it in them, at addresses that no library multiplies from or into fast. So do weights that a
    checkpoint stores in ways that are none of a joined weight.
    """
    groups: dict[tuple[FxNode, str], list[list[FxNode]]] = defaultdict(list)
    for node in graph.nodes:
        layer = layer_of(node)
        if node.target is aten.linear.default and layer is not None and tensor(node).shape[-1] % _ALIGNED == 0:
            found = groups[node.args[0], layer]
            group = next((nodes for nodes in found if are_stored_alike([*nodes, node], ctx)), None)
            if group is None:
                found.append([node])
            else:
                group.append(node)
    changed = False
    for nodes in (nodes for found in groups.values() for nodes in found):
        if not fusible(nodes, ctx):
            continue
        fused = fuse(ctx, nodes)
        start = 0
        for node in nodes:
            size = tensor(node).shape[-1]
            with ctx.before(node):
                part = ctx.call(aten.slice.Tensor, fused, tensor(node).dim() - 1, start, start + size, 1)
            ctx.replace(node, part)
            start += size
        changed = True
    return changed


def fusible(nodes: Sequence[FxNode], ctx: PassContext) -> bool:
    """Whether these are two or more products of one input with params of their own, all with a bias or none."""
    if len(nodes) < 2 or any(node.target is not aten.linear.default for node in nodes):
        return False
    weights = [node.args[1] for node in nodes]
    biases = [bias for node in nodes if (bias := argument(node, "bias")) is not None]
    own = all(ctx.is_param(param) and len(param.users) == 1 for param in (*weights, *biases))
    one_input = len({node.args[0] for node in nodes}) == 1
    apart = len(biases) in (0, len(nodes)) and len(set(weights)) == len(weights)
    return own and one_input and apart and are_stored_alike(nodes, ctx)


def are_stored_alike(nodes: Sequence[FxNode], ctx: PassContext) -> bool:
    """Whether the weights of these products, joined, can be kept as a checkpoint stores them, and their inputs are
    rounded alike."""
    weights = [node.args[1] for node in nodes]
    if ctx.options.dequantise or not all(map(ctx.is_param, weights)):
        return True
    dtype = str(tensor(weights[0]).dtype).removeprefix("torch.")
    recipes = [ctx.params[weight.name].recipe for weight in weights]
    one_input = len({rounding_of(recipe, ctx.roundings) for recipe in recipes}) == 1
    return one_input and fit_together(recipes, dtype)  # type: ignore[arg-type]


def fuse(ctx: PassContext, nodes: Sequence[FxNode]) -> FxNode:
    """The fused product, standing before the first of `nodes`."""
    first = min(nodes, key=list(nodes[0].graph.nodes).index)
    weight = _concat(ctx, [node.args[1] for node in nodes])
    biases = [argument(node, "bias") for node in nodes]
    bias = None if biases[0] is None else _concat(ctx, biases)
    with ctx.before(first):
        return ctx.call(aten.linear.default, first.args[0], weight, bias)


def _concat(ctx: PassContext, params: Sequence[FxNode]) -> FxNode:
    infos = [ctx.params[param.name] for param in params]
    shape = sum(tensor(param).shape[0] for param in params), *tensor(params[0]).shape[1:]
    name, recipe = joined([info.name for info in infos]), Concat(tuple(info.recipe for info in infos), 0)
    return ctx.new_param(params[-1], name, recipe, shape)


def joined(names: Sequence[str]) -> str:
    """`attn.q_proj.weight`, `attn.k_proj.weight` -> `attn.q_proj_k_proj.weight`."""
    parts = [name.split(".") for name in names]
    head = _common(parts)
    tail = _common([part[::-1] for part in parts])
    middle = "_".join("_".join(part[head : len(part) - tail]) for part in parts)
    return ".".join([*parts[0][:head], middle, *parts[0][len(parts[0]) - tail :]])


def _common(parts: Sequence[Sequence[str]]) -> int:
    """How many leading items all parts share."""
    count = 0
    for items in zip(*parts, strict=False):
        if len(set(items)) > 1:
            break
        count += 1
    return count


_SMALL = 1 << 20
"""Elements of a param that is worth having twice, as it is and otherwise."""


@node_pass(stage="match", version=1, requires=("normalise_views", "match_norms"), before=(one_spelling_of_views,))
def fold_param_views(ctx: PassContext, node: FxNode) -> FxNode | None:
    """A view, conversion or concatenation of params -> one param whose recipe does it while weights are read.

    Legal always; a large param of which something uses all elements as they are stays one param, and is not held twice.
    """
    if node.target is aten.cat.default and _are_joinable(node, ctx):
        return _joined(ctx, node)
    if not node.args or not ctx.is_param(node.args[0]):
        return None
    source: FxNode = node.args[0]
    is_small = tensor(source).numel() <= _SMALL
    if not _is_foldable(node) or not (is_small or all(_is_foldable(user) for user in source.users)):
        return None
    recipe, suffix = _FOLDS[node.target](node, source, ctx.params[source.name].recipe)
    return _param(ctx, source, node, recipe, f"{ctx.params[source.name].name}.{suffix}")


def _are_joinable(node: FxNode, ctx: PassContext) -> bool:
    """Whether these are params of one dtype of which nothing else uses a large one."""
    parts: Sequence[FxNode] = node.args[0]
    alone = all(ctx.is_param(part) and (len(part.users) == 1 or tensor(part).numel() <= _SMALL) for part in parts)
    return alone and len({tensor(part).dtype for part in parts}) == 1


def _joined(ctx: PassContext, node: FxNode) -> FxNode:
    parts: Sequence[FxNode] = node.args[0]
    dim = argument(node, "dim") % tensor(node).dim()
    infos = [ctx.params[part.name] for part in parts]
    name = f"{joined([info.name for info in infos])}.joined_{dim}"
    return _param(ctx, parts[-1], node, Concat(tuple(info.recipe for info in infos), dim), name)


def _is_foldable(node: FxNode) -> bool:
    if node.target not in _FOLDS or node.kwargs or not all(isinstance(size, int) for size in _sizes(node)):
        return False
    return node.target is not aten.slice.Tensor or node.args[4:] in ((), (1,))


def _param(ctx: PassContext, source: FxNode, node: FxNode, recipe: Recipe, name: str) -> FxNode:
    """The param of this recipe, made if there is none yet."""
    for place, info in ctx.params.items():
        if info.name == name:
            assert info.recipe == recipe, f"two params named {name}"
            return placeholder(source.graph, place)
    new = ctx.new_param(source, name, recipe, tuple(tensor(node).shape))
    new.meta["val"] = ctx.empty(tuple(tensor(node).shape), tensor(node).dtype)
    return new


def _sizes(node: FxNode) -> Sequence[Any]:
    return list(tensor(node).shape)


def _transpose(node: FxNode, source: FxNode, recipe: Recipe) -> tuple[Recipe, str]:
    dims = sorted(dim % tensor(source).dim() for dim in node.args[1:])
    return Transpose(recipe, *dims), f"transposed_{dims[0]}_{dims[1]}"


def _permute(node: FxNode, source: FxNode, recipe: Recipe) -> tuple[Recipe, str]:
    """By exchanges of two dimensions, each of which brings one dimension to its place."""
    wanted = [dim % tensor(source).dim() for dim in node.args[1]]
    order = list(range(len(wanted)))
    for place, dim in enumerate(wanted):
        at = order.index(dim)
        if at != place:
            recipe = Transpose(recipe, place, at)
            order[place], order[at] = order[at], order[place]
    return recipe, "permuted_" + "_".join(map(str, wanted))


def _reshape(node: FxNode, source: FxNode, recipe: Recipe) -> tuple[Recipe, str]:
    shape = tuple(_sizes(node))
    return Reshape(recipe, shape), "reshaped_" + "_".join(map(str, shape))


def _slice(node: FxNode, source: FxNode, recipe: Recipe) -> tuple[Recipe, str]:
    dim, start = node.args[1] % tensor(source).dim(), node.args[2] or 0
    length = _sizes(node)[dim]
    return Slice(recipe, dim, start, length), f"sliced_{dim}_{start}_{length}"


def _select(node: FxNode, source: FxNode, recipe: Recipe) -> tuple[Recipe, str]:
    dim = node.args[1] % tensor(source).dim()
    index = node.args[2] % tensor(source).shape[dim]
    return Reshape(Slice(recipe, dim, index, 1), tuple(_sizes(node))), f"selected_{dim}_{index}"


def _cast(node: FxNode, source: FxNode, recipe: Recipe) -> tuple[Recipe, str]:
    dtype = str(tensor(node).dtype).removeprefix("torch.")
    return Cast(recipe, dtype), dtype  # type: ignore[arg-type]


_FOLDS = {
    aten.transpose.int: _transpose, aten.permute.default: _permute, aten.reshape.default: _reshape,
    aten.unsqueeze.default: _reshape, aten.squeeze.dim: _reshape, aten.squeeze.default: _reshape,
    aten.slice.Tensor: _slice, aten.select.int: _select, aten.to.dtype: _cast,
}  # fmt: skip
