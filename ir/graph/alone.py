"""A graph on one rank: collectives change nothing there and are left out, and ops of parts are those of the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from precast.ir.graph.schema import Arg, Block, Call, Graph, Items, Node, Ref
from precast.ir.ops import table

Step = TypeVar("Step", bound=Node | Call)


def without_collectives(graph: Graph) -> Graph:
    """The graph, bound to one rank: what read the result of a collective reads its argument `x`."""
    main, names = _kept(graph.main)
    outputs = {name: names.get(value, value) for name, value in graph.outputs.items()}
    blocks = tuple(map(_block, graph.blocks))
    return msgspec.structs.replace(graph, main=main, blocks=blocks, outputs=outputs)


def is_collective(node: Node) -> bool:
    """Whether the node computes its result of what all ranks of a group have."""
    row = table.lookup(node.op, node.version)
    return row is not None and any(arg.kind == "Group" for arg in row.args)


def _block(block: Block) -> Block:
    nodes, names = _kept(block.nodes)
    return msgspec.structs.replace(block, nodes=nodes, outputs=tuple(names.get(each, each) for each in block.outputs))


def _kept(steps: Sequence[Step]) -> tuple[tuple[Step, ...], dict[str, str]]:
    """The steps but for collectives; and by the name of each of their results, the name of what it equals."""
    names: dict[str, str] = {}
    kept: list[Step] = []
    for step in steps:
        if isinstance(step, Call):
            bound = {name: names.get(value, value) for name, value in step.args.items()}
            kept.append(msgspec.structs.replace(step, args=bound))
            continue
        args = {name: renamed(arg, names) for name, arg in step.args.items()}
        given = args.get("x")
        if is_collective(step) and step.op not in OF_PARTS and isinstance(given, Ref):
            names[step.outputs[0].name] = given.name
        else:
            kept.append(of_the_whole(msgspec.structs.replace(step, args=args)))
    return tuple(kept), names


def of_the_whole(step: Step) -> Step:
    """An op of parts, as that of the whole."""
    if isinstance(step, Call) or step.op not in OF_PARTS:
        return step
    op, arg = OF_PARTS[step.op]
    args = {name: given for name, given in step.args.items() if name != arg}
    return msgspec.structs.replace(step, op=op, version=1, args=args)


OF_PARTS = {
    "precast.sharded_embedding": ("precast.embedding", "start"),
    "precast.quantised_sharded_embedding": ("precast.quantised_embedding", "start"),
    "precast.all_reduce_residual_rms_norm": ("precast.residual_rms_norm", "group"),
}
"""Ops of parts: what is the same of the whole, and the argument that this has not."""


def renamed(arg: Arg, names: Mapping[str, str]) -> Arg:
    """The argument with other names where it has one of these."""
    if isinstance(arg, Ref):
        return Ref(names.get(arg.name, arg.name))
    if isinstance(arg, Items):
        return Items(tuple(renamed(item, names) for item in arg.items))  # type: ignore[misc]
    return arg
