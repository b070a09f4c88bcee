"""Makes one op of the first product of a gated feed-forward layer and its gate, in the bundle's own graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from precast.builder.passes.graph_pass import lowered_pass
from precast.ir.graph import schema as ir
from precast.ir.graph.infer import references


@lowered_pass(version=1)
def fuse_gated_linear(graph: ir.Graph) -> ir.Graph:
    """gated_activation(linear(x, w, b)) -> gated_linear(x, w, b), in main and in each block.

    Legal when nothing else takes the product. The new node stands where the product stood.
    """
    blocks = tuple(msgspec.structs.replace(block, nodes=_fused(block.nodes, block.outputs)) for block in graph.blocks)
    return msgspec.structs.replace(graph, blocks=blocks, main=_fused(graph.main, graph.outputs.values()))


def _fused(steps: Sequence[ir.Node | ir.Call], outputs: Iterable[str]) -> tuple[Any, ...]:
    """The steps of a function that returns `outputs`."""
    taken = Counter(outputs)
    for step in steps:
        taken.update(references(step.args) if isinstance(step, ir.Node) else step.args.values())
    products = {step.outputs[0].name for step in steps if _is(step, "aten.linear.default")}
    gates: dict[str, ir.Node] = {}
    for step in steps:
        for name in references(step.args) if _is(step, "precast.gated_activation") else ():
            if name in products and taken[name] == 1:
                gates[name] = step
    gone = {id(gate) for gate in gates.values()}
    return tuple(_with_gate(step, gates) for step in steps if id(step) not in gone)


def _is(step: ir.Node | ir.Call, op: str) -> bool:
    return isinstance(step, ir.Node) and (step.op, step.version) == (op, 1)


def _with_gate(step: ir.Node | ir.Call, gates: dict[str, ir.Node]) -> ir.Node | ir.Call:
    """The step; if it is a product that has a gate, both as one."""
    gate = gates.get(step.outputs[0].name) if step.outputs else None
    if gate is None:
        return step
    return ir.Node("precast.gated_linear", {**step.args, "kind": gate.args["kind"]}, gate.outputs)
