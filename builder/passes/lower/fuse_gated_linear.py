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
    nodes = [step for step in steps if isinstance(step, ir.Node) and step.version == 1]
    products = {node.outputs[0].name: node for node in nodes if node.op == "aten.linear.default"}
    gates = {
        name: node
        for node in nodes
        if node.op == "precast.gated_activation"
        for name in references(node.args)
        if name in products and taken[name] == 1
    }
    gated = {
        name: ir.Node("precast.gated_linear", {**products[name].args, "kind": gate.args["kind"]}, gate.outputs)
        for name, gate in gates.items()
    }
    gone = {gate.outputs[0].name for gate in gates.values()}
    left = [step for step in steps if not step.outputs or step.outputs[0].name not in gone]
    return tuple(gated.get(step.outputs[0].name, step) if step.outputs else step for step in left)
