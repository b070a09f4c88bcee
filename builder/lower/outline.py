"""Finds the layers in a flat list of nodes, and stores each distinct one once.

The nodes of one layer become a call. Two layers share a block if and only if they are equal up to the names of
their values, params and cache tensors: same ops, same constants, same types, same wiring, and weights that a checkpoint
stores in one way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from precast.ir.graph import schema as ir
from precast.ir.memory import caches


@dataclasses.dataclass(frozen=True)
class Flat:
    """A graph before its layers are found: each node with its layer's path, or None outside of layers."""

    symbols: tuple[ir.Symbol, ...]
    inputs: tuple[ir.Value, ...]
    params: tuple[ir.Param, ...]
    constants: tuple[ir.Value, ...]
    nodes: tuple[tuple[ir.Node, str | None], ...]
    outputs: dict[str, str]
    caches: ir.CachePlan


def outline(flat: Flat, storages: Mapping[str, object] | None = None) -> ir.Graph:
    """The graph with one block for each distinct layer. `storages`: what must be equal of params in it."""
    kinds = _kinds(flat)
    types = _types(flat)
    runs = _runs(flat.nodes)
    shared = _used_between(runs) | set(flat.outputs.values())
    main: list[ir.Node | ir.Call] = []
    blocks: dict[tuple[object, ...], ir.Block] = {}
    for layer, nodes in runs:
        if layer is None or not _results(nodes, shared):
            main.extend(nodes)  # a block returns something: what only writes into caches stands in main
            continue
        block, call = _cut(nodes, shared, kinds, types)
        key = msgspec.msgpack.encode(block), *((storages or {}).get(name) for name in call.args.values())
        named = blocks.setdefault(key, msgspec.structs.replace(block, name=f"layer{len(blocks)}"))
        main.append(msgspec.structs.replace(call, block=named.name))
    used = {name for step in main for name in _names_in(step)} | set(flat.outputs.values())
    return ir.Graph(
        symbols=flat.symbols,
        inputs=flat.inputs,
        params=tuple(param for param in flat.params if param.name in used or _tied_to(param, flat.params)),
        constants=tuple(value for value in flat.constants if value.name in used),
        blocks=tuple(blocks.values()),
        main=tuple(main),
        outputs=flat.outputs,
        caches=flat.caches,
    )


def _tied_to(param: ir.Param, params: Iterable[ir.Param]) -> bool:
    return any(getattr(other.recipe, "param", None) == param.name for other in params)


def _runs(nodes: Sequence[tuple[ir.Node, str | None]]) -> list[tuple[str | None, list[ir.Node]]]:
    """Consecutive nodes of one layer. A layer that is interrupted by another's nodes is cut at the interruption."""
    runs: list[tuple[str | None, list[ir.Node]]] = []
    for node, layer in nodes:
        if not runs or runs[-1][0] != layer:
            runs.append((layer, []))
        runs[-1][1].append(node)
    return runs


def _kinds(flat: Flat) -> dict[str, str]:
    kinds = {param.name: "params" for param in flat.params}
    kinds |= {v.name: "caches" for v in caches.tensors(flat.caches)}
    return kinds


def _types(flat: Flat) -> dict[str, ir.TensorType]:
    types = {value.name: value.type for value in (*flat.inputs, *flat.constants)}
    types |= {param.name: param.type for param in flat.params}
    types |= {v.name: v.type for v in caches.tensors(flat.caches)}
    types |= {value.name: value.type for node, _ in flat.nodes for value in node.outputs}
    return types


def _used_between(runs: Sequence[tuple[str | None, list[ir.Node]]]) -> set[str]:
    """The names that some run uses and another one makes."""
    used: set[str] = set()
    for _, nodes in runs:
        made = {value.name for node in nodes for value in node.outputs}
        used.update(name for node in nodes for name in _names_in(node) if name not in made)
    return used


def _results(nodes: Sequence[ir.Node], shared: set[str]) -> list[ir.Value]:
    """The values of these nodes that are used outside of them."""
    return [value for node in nodes for value in node.outputs if value.name in shared]


def _names_in(step: ir.Node | ir.Call) -> Iterable[str]:
    if isinstance(step, ir.Call):
        yield from step.args.values()
        return
    for arg in step.args.values():
        for item in arg.items if isinstance(arg, ir.Items) else (arg,):
            if isinstance(item, ir.Ref):
                yield item.name


def _cut(
    nodes: Sequence[ir.Node], shared: set[str], kinds: dict[str, str], types: dict[str, ir.TensorType]
) -> tuple[ir.Block, ir.Call]:
    """The nodes as a block with names of its own, and the call that puts it in their place."""
    local: dict[str, str] = {}
    interface: dict[str, list[ir.Value]] = {"inputs": [], "params": [], "caches": []}
    bindings: dict[str, str] = {}
    count: dict[str, int] = {}
    made = {value.name for node in nodes for value in node.outputs}
    for node in nodes:
        for name in _names_in(node):
            if name in local or name in made:
                continue
            kind = kinds.get(name, "inputs")
            local[name] = f"{kind[:-1]}{len(interface[kind])}"
            interface[kind].append(ir.Value(local[name], types[name]))
            bindings[local[name]] = name
        for value in node.outputs:
            short = node.op.split(".")[1]
            local[value.name] = f"{short}_{count.get(short, 0)}"
            count[short] = count.get(short, 0) + 1
    outputs = _results(nodes, shared)
    block = ir.Block(
        name="",
        inputs=tuple(interface["inputs"]),
        params=tuple(interface["params"]),
        caches=tuple(interface["caches"]),
        nodes=tuple(_renamed(node, local) for node in nodes),
        outputs=tuple(local[value.name] for value in outputs),
    )
    return block, ir.Call("", bindings, tuple(outputs))


def _renamed(node: ir.Node, names: dict[str, str]) -> ir.Node:
    def rename(arg: ir.Arg) -> ir.Arg:
        if isinstance(arg, ir.Ref):
            return ir.Ref(names[arg.name])
        if isinstance(arg, ir.Items):
            return ir.Items(tuple(rename(item) for item in arg.items))  # type: ignore[misc]
        return arg

    return msgspec.structs.replace(
        node,
        args={name: rename(arg) for name, arg in node.args.items()},
        outputs=tuple(ir.Value(names[value.name], value.type) for value in node.outputs),
    )
