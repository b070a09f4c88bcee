"""A graph without what does nothing: once the sizes of the world are numbers, a cut may take all and an offset be 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from precast.ir.graph.schema import Arg, Block, Call, Const, Dim, Graph, Items, Node, Ref, TensorType
from precast.ir.memory import caches
from precast.ir.weights.shortest import shortest


def plain(graph: Graph) -> Graph:
    """The graph, bound to a world: sizes that are numbers are literals, nodes that give what they take are left out,
    and recipes say in the shortest way what they make.

    Nodes are left out that a builder makes for several worlds: slices of all there is, and sums and products with a
    size that is 0 or 1.
    """
    held = {value.name: value.type for value in (*graph.inputs, *graph.constants, *caches.tensors(graph.caches))}
    params = tuple(msgspec.structs.replace(param, recipe=shortest(param.recipe)) for param in graph.params)
    main, names = _kept(graph.main, held | {param.name: param.type for param in params})
    return msgspec.structs.replace(
        graph,
        params=params,
        blocks=tuple(map(_block, graph.blocks)),
        main=main,
        outputs={name: names.get(value, value) for name, value in graph.outputs.items()},
    )


def _block(block: Block) -> Block:
    given = {value.name: value.type for value in (*block.inputs, *block.params, *block.caches)}
    nodes, names = _kept(block.nodes, given)
    return msgspec.structs.replace(block, nodes=nodes, outputs=tuple(names.get(each, each) for each in block.outputs))


def _kept(steps: Sequence[Any], given: Mapping[str, TensorType]) -> tuple[tuple[Any, ...], dict[str, str]]:
    """The steps that do something; and by the name of each other result, the name of what it equals."""
    types = {**given, **{value.name: value.type for step in steps for value in step.outputs}}
    names: dict[str, str] = {}
    kept: list[Node | Call] = []
    for step in steps:
        if isinstance(step, Call):
            bound = {name: names.get(value, value) for name, value in step.args.items()}
            kept.append(msgspec.structs.replace(step, args=bound))
            continue
        source = _unchanged(step, types)
        if source is not None:
            names[step.outputs[0].name] = names.get(source, source)
        else:
            args = {name: _written(arg, names) for name, arg in step.args.items()}
            kept.append(msgspec.structs.replace(step, args=args))
    return tuple(kept), names


def _unchanged(node: Node, types: Mapping[str, TensorType]) -> str | None:
    """The name of the argument that the node gives as it is; None: it does something."""
    source = node.args.get("self")
    if not isinstance(source, Ref) or source.name not in types:
        return None
    if node.op == "aten.slice.Tensor":
        same = _number(node.args["start"]) == 0 and types[source.name] == node.outputs[0].type
        return source.name if same else None
    neutral = _NEUTRAL.get(node.op)
    other = node.args.get("other")
    return source.name if neutral is not None and isinstance(other, Dim) and other.expr == neutral else None


_NEUTRAL = {"aten.add.Tensor": 0, "aten.sub.Tensor": 0, "aten.mul.Tensor": 1}


def _number(arg: Arg) -> object:
    return arg.expr if isinstance(arg, Dim) else arg.value if isinstance(arg, Const) else None


def _written(arg: Arg, names: Mapping[str, str]) -> Arg:
    if isinstance(arg, Ref):
        return Ref(names.get(arg.name, arg.name))
    if isinstance(arg, Dim) and isinstance(arg.expr, int):
        return Const(arg.expr)
    if isinstance(arg, Items):
        return Items(tuple(_written(item, names) for item in arg.items))  # type: ignore[misc]
    return arg
