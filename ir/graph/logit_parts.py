"""A graph on one of several ranks that gives the logits of the rank's part of the vocabulary, as they are before the
ranks put them together: to draw a token, ranks need not have each other's logits.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from precast.ir.graph.infer import references
from precast.ir.graph.schema import Call, Const, Graph, Node, Ref


class InParts(NamedTuple):
    """The graph, whose output `logits` has so many `columns` of the `size` tokens there are."""

    graph: Graph
    columns: int
    size: int


def in_parts(graph: Graph, output: str = "logits") -> InParts | None:
    """The graph, bound to a world, without the exchange that puts its logits together; None: its logits are not so."""
    made = {value.name: step for step in graph.main for value in step.outputs}
    name, dropped = graph.outputs[output], []
    step = made.get(name)
    size = None if step is None else next(value.type for value in step.outputs if value.name == name).shape[-1]
    if isinstance(step, Node) and step.op == "aten.slice.Tensor" and step.args["start"] == Const(0):
        dropped.append(step)
        step = made.get(_source(step, "self"))
    if not isinstance(step, Node) or step.op != "precast.all_gather" or not isinstance(size, int):
        return None
    dropped.append(step)
    source = _source(step, "x")
    kind = next((value.type for each in graph.main for value in each.outputs if value.name == source), None)
    gathered = step.outputs[0].type
    if kind is None or step.args["dim"] not in (Const(-1), Const(len(kind.shape) - 1)):
        return None
    columns = kind.shape[-1]
    kept = tuple(each for each in graph.main if each not in dropped)
    taken = {name for each in kept for name in
             (each.args.values() if isinstance(each, Call) else references(each.args))}  # fmt: skip
    others = {value for key, value in graph.outputs.items() if key != output}
    if not isinstance(columns, int) or not isinstance(gathered.shape[-1], int) or size > gathered.shape[-1]:
        return None
    if any(value.name in taken | others for each in dropped for value in each.outputs):
        return None
    return InParts(msgspec.structs.replace(graph, main=kept, outputs={**graph.outputs, output: source}), columns, size)


def _source(node: Node, arg: str) -> str:
    given = node.args[arg]
    return given.name if isinstance(given, Ref) else ""
