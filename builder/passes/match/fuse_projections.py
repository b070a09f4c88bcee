"""Products of one input with several params become one product with the params one below the other.

The fused param is a recipe: the parts are read straight into their places, and nothing is copied afterwards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from precast.builder.graph.context import FxGraph, FxNode, PassContext, tensor
from precast.builder.graph.layers import layer_of
from precast.builder.passes.graph_pass import graph_pass
from precast.ir.graph.schema import Concat

aten = torch.ops.aten


@graph_pass(stage="match", version=1, requires=("normalise_linear", "fuse_gated_activation"))
def fuse_projections(graph: FxGraph, ctx: PassContext) -> bool:
    """linear(x, q), linear(x, k), linear(x, v) of one layer -> slices of linear(x, concat(q, k, v))."""
    groups: dict[tuple[FxNode, str], list[FxNode]] = defaultdict(list)
    for node in graph.nodes:
        layer = layer_of(node)
        if node.target is aten.linear.default and layer is not None:
            groups[node.args[0], layer].append(node)
    changed = False
    for nodes in groups.values():
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
    biases = [node.args[2] for node in nodes if len(node.args) > 2 and node.args[2] is not None]
    own = all(ctx.is_param(param) and len(param.users) == 1 for param in (*weights, *biases))
    one_input = len({node.args[0] for node in nodes}) == 1
    return own and one_input and len(biases) in (0, len(nodes)) and len(set(weights)) == len(weights)


def fuse(ctx: PassContext, nodes: Sequence[FxNode]) -> FxNode:
    """The fused product, standing before the first of `nodes`."""
    first = min(nodes, key=list(nodes[0].graph.nodes).index)
    weight = _concat(ctx, [node.args[1] for node in nodes])
    has_bias = len(nodes[0].args) > 2 and nodes[0].args[2] is not None
    bias = _concat(ctx, [node.args[2] for node in nodes]) if has_bias else None
    with ctx.before(first):
        return ctx.call(aten.linear.default, first.args[0], weight, bias)


def _concat(ctx: PassContext, params: Sequence[FxNode]) -> FxNode:
    infos = [ctx.params[param.name] for param in params]
    like = tensor(params[0])
    rows = sum(tensor(param).shape[0] for param in params)
    return ctx.new_param(
        params[-1], joined([info.name for info in infos]), Concat(tuple(info.recipe for info in infos), 0),
        (rows, *like.shape[1:]),
    )  # fmt: skip


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
