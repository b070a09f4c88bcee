"""Finds positions that a model counts itself, to look them up in a table: those of its tokens in a single sequence."""

from __future__ import annotations

import torch

from precast.builder.context import PassContext, tensor
from precast.builder.fx_types import FxGraph, FxNode
from precast.builder.pipeline import graph_pass
from precast.builder.sizes import shape_of

aten = torch.ops.aten

_COUNTS = (aten.arange.default, aten.arange.start)
_KEEPS = (
    # give back each of the numbers, moved by an offset or looked at otherwise
    aten.unsqueeze.default, aten.expand.default, aten.view.default, aten.reshape.default, aten.to.device,
    aten.add.Tensor, aten.alias.default,
)  # fmt: skip


@graph_pass(stage="normalise", version=1)
def match_positions(graph: FxGraph, ctx: PassContext) -> bool:
    """embedding(table, arange(T)) -> embedding(table, positions[0]).

    The model sees one sequence from its start, and counts its tokens; a batch has several, and parts of them. Numbers
    of tokens that do anything else than find a row of a param or constant are left, and refused behind the passes.
    """
    positions = next((node for node in graph.nodes if node.op == "placeholder" and node.name == "positions"), None)
    changed = False
    for node in list(graph.nodes):
        if positions is None or node.target not in _COUNTS or not _is_count_of_tokens(node, ctx):
            continue
        if all(_looks_up(user, node, ctx) for user in node.users):
            with ctx.before(node):
                new = ctx.call(graph, aten.select.int, positions, 0, 0)
            ctx.replace(node, new)
            changed = True
    return changed


def _is_count_of_tokens(node: FxNode, ctx: PassContext) -> bool:
    """Whether these are 0, 1, ... up to the number of tokens."""
    starts = node.target is aten.arange.default or node.args[0] == 0
    return starts and tensor(node).dtype == torch.int64 and shape_of(tensor(node), ctx.symbols) == ("T",)


def _looks_up(user: FxNode, numbers: FxNode, ctx: PassContext) -> bool:
    """Whether this user of the numbers, and whoever uses its result, does nothing but find rows of a table by them."""
    if user.target is aten.embedding.default:
        table = user.args[0]
        return user.args[1] is numbers and (ctx.is_param(table) or ctx.constant(table) is not None)
    if user.target not in _KEEPS or user.all_input_nodes[0] is not numbers:
        return False
    if user.target is aten.add.Tensor and not isinstance(user.args[1], int):
        return False
    return bool(user.users) and all(_looks_up(each, user, ctx) for each in user.users)
