"""How much floating-point work a graph does, and how much of it in ops that kernels are written for.

Those are the `precast` ops and the linear layers. The work is counted for one sequence of `TOKENS` tokens, as each op's
row of the op table says.
"""

from __future__ import annotations

from collections.abc import Mapping

from precast.ir.graph import symbols
from precast.ir.graph.schema import Block, Call, Graph, Node, TensorType, Value
from precast.ir.graph.symbols import evaluate
from precast.ir.memory import caches
from precast.ir.ops.table import lookup
from precast.ir.ops.work import Shape, Shapes

TOKENS = 1024
"""Of the one sequence that is counted; attention looks back over it."""

_LINEAR = ("aten.linear.default", "aten.addmm.default")


def precast_share(graph: Graph) -> float:
    """The part of the graph's floating-point work, 0 to 1, that `precast` ops and linear layers do."""
    ours, total = work(graph)
    return ours / total if total else 1.0


def work(graph: Graph) -> tuple[float, float]:
    """Floating-point operations for one sequence of `TOKENS` tokens: in `precast` ops and linear layers, and in all."""
    sizes = {symbol.name: max(symbol.min, 1) for symbol in graph.symbols} | {"T": TOKENS, "B": 1, "R": TOKENS}
    blocks = {block.name: _sum(block.nodes, _block_values(block), sizes) for block in graph.blocks}
    nodes = [step for step in graph.main if isinstance(step, Node)]
    ours, total = _sum(nodes, _main_values(graph), sizes)
    for step in graph.main:
        if isinstance(step, Call):
            ours, total = ours + blocks[step.block][0], total + blocks[step.block][1]
    return ours, total


def _block_values(block: Block) -> list[Value]:
    made = [value for node in block.nodes for value in node.outputs]
    return [*block.inputs, *block.params, *block.caches, *made]


def _main_values(graph: Graph) -> list[Value]:
    params = [Value(param.name, param.type) for param in graph.params]
    made = [value for step in graph.main for value in step.outputs]
    return [*graph.inputs, *params, *graph.constants, *caches.tensors(graph.caches), *made]


def _sum(nodes: tuple[Node, ...] | list[Node], values: list[Value], sizes: Mapping[str, int]) -> tuple[float, float]:
    shapes = {value.name: _shape(value.type, sizes) for value in values}
    ours = total = 0.0
    for node in nodes:
        count = node_work(node, shapes)
        total += count
        if node.op.startswith("precast.") or node.op in _LINEAR:
            ours += count
    return ours, total


def _shape(kind: TensorType, sizes: Mapping[str, int]) -> Shape:
    unknown = {name: 1 for size in kind.shape for name in symbols.free_symbols(size)}
    return tuple(evaluate(size, unknown | dict(sizes)) for size in kind.shape)


def node_work(node: Node, shapes: Shapes) -> float:
    """Floating-point operations of one node of the op table, given the shapes of all names."""
    op = lookup(node.op, node.version)
    assert op is not None, f"{node.op}@{node.version} is not in the op table"
    return op.work(node, shapes)
