"""Gives equal models equal graphs: equal calls are merged, and the order of nodes doesn't depend on the trace's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from precast.builder.graph.context import FxGraph, FxNode, PassContext
from precast.builder.graph.nodes import is_write, layer_of
from precast.builder.passes.graph_pass import graph_pass


@graph_pass(stage="normalise", version=1)
def merge_duplicates(graph: FxGraph, ctx: PassContext) -> bool:
    """Two calls of one pure op with the same arguments in the same layer -> one."""
    changed = False
    seen: dict[Any, FxNode] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or is_write(node):
            continue
        key = (node.target, _frozen(node.args), _frozen(node.kwargs), layer_of(node))
        first = seen.setdefault(key, node)
        if first is not node:
            ctx.replace(node, first)
            changed = True
    return changed


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, dict):
        return tuple(sorted((key, _frozen(item)) for key, item in value.items()))
    return (type(value), str(value) if isinstance(value, torch.SymInt) else value)


@graph_pass(stage="normalise", version=1)
def order_nodes(graph: FxGraph, ctx: PassContext) -> bool:
    """Nodes between layers stand in the order in which later nodes first use them."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    changed = False
    for run in reversed(_runs(graph)):  # from the end: the users' order is final before the used ones'
        ordered = _by_first_use(run, position)
        if ordered == run:
            continue
        places = [position[node] for node in run]
        before = run[0].prev
        for place, node in zip(places, ordered, strict=True):
            before.append(node)
            before, position[node] = node, place
        changed = True
    return changed


def _runs(graph: FxGraph) -> list[list[FxNode]]:
    """Consecutive calls outside of layers."""
    runs: list[list[FxNode]] = [[]]
    for node in graph.nodes:
        if node.op == "call_function" and layer_of(node) is None:
            runs[-1].append(node)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _by_first_use(run: Sequence[FxNode], position: dict[FxNode, int]) -> list[FxNode]:
    """The run's nodes: those that others use first come first, each after its arguments.

    A node that nobody uses comes first of all.
    """
    inside = set(run)
    uses = {node: _first_use(node, inside, position) for node in run}
    ends = sorted((use, node) for node, use in uses.items() if use is not None)
    ordered: dict[FxNode, None] = {}
    for node in [*(node for node in run if not node.users), *(node for _, node in ends)]:
        _place(node, inside, ordered)
    return list(ordered)


def _first_use(node: FxNode, inside: set[FxNode], position: dict[FxNode, int]) -> tuple[int, int] | None:
    """The position of the first user outside of the run, and the argument's number there."""
    uses = [(position[user], user.all_input_nodes.index(node)) for user in node.users if user not in inside]
    return min(uses, default=None)


def _place(node: FxNode, inside: set[FxNode], ordered: dict[FxNode, None]) -> None:
    """Puts the node after its arguments of the run, and those after theirs."""
    stack = [node]
    while stack:
        top = stack[-1]
        missing = [arg for arg in top.all_input_nodes if arg in inside and arg not in ordered]
        if missing:
            stack.append(missing[0])
        else:
            ordered[stack.pop()] = None
