"""Makes the copies in front of reshapes nodes of the graph, so that all reshapes are views; and copies what lies as no
library multiplies it in front of linear layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from precast.builder.passes.graph_pass import lowered_pass
from precast.builder.passes.lower.spelled_out import types_of
from precast.ir.graph import schema as ir
from precast.ir.graph import symbols
from precast.ir.graph.infer import references
from precast.ir.graph.world import UNSHARDED
from precast.ir.memory import caches, strides
from precast.ir.memory.addresses import VIEWS
from precast.ir.memory.liveness import generic_sizes
from precast.ir.memory.strides import Layout
from precast.ir.memory.views import view_of

_Places = dict[tuple[str, int], str]
"""Nodes by their function, empty for `main`, and their place in it: which argument is copied."""


@lowered_pass(version=2)
def copy_before_reshape(graph: ir.Graph) -> ir.Graph:
    """reshape(x) -> reshape(cat([x])), where x doesn't lie so that the reshape is a view of it; and linear(x, w) ->
    linear(cat([x]), w), where neither the elements of a row of x lie side by side nor its rows, or in float32 the rows.

    The copy of a reshape is made anyway. As a node its memory is planned, and every backend computes it. cuBLASLt has
    no product in float32 of an input and a weight that both lie by columns, as it sees them. Layouts are those of sizes
    without common factors; what some op may give in another order than the row-major one is taken to be row-major.
    """
    found: _Places = {}
    _Walk(graph, found).main()
    blocks = tuple(
        msgspec.structs.replace(block, nodes=tuple(_copied(block.name, block.nodes, types_of(block), found)))
        for block in graph.blocks
    )
    return msgspec.structs.replace(graph, blocks=blocks, main=tuple(_copied("", graph.main, types_of(graph), found)))


def _copied(
    function: str, steps: Sequence[ir.Node | ir.Call], types: Mapping[str, ir.TensorType], found: _Places
) -> Iterator[ir.Node | ir.Call]:
    for place, step in enumerate(steps):
        if isinstance(step, ir.Node) and (function, place) in found:
            name = found[function, place]
            source = step.args[name]
            assert isinstance(source, ir.Ref), "verified: a tensor"
            copy = ir.Value(f"{step.outputs[0].name}_copied", types[source.name])
            args: dict[str, ir.Arg] = {"tensors": ir.Items((source,)), "dim": ir.Const(_known_axis(copy.type))}
            yield ir.Node("aten.cat.default", args, (copy,))
            step = msgspec.structs.replace(step, args={**step.args, name: ir.Ref(copy.name)})
        yield step


def _known_axis(kind: ir.TensorType) -> int:
    """One that counts no tokens, if there is one."""
    return next((axis for axis, size in enumerate(kind.shape) if isinstance(size, int)), 0)


class _Walk:
    """Where the values of a graph lie, as elements of the memory that they look into."""

    def __init__(self, graph: ir.Graph, found: _Places) -> None:
        self._graph, self._found = graph, found
        self._blocks = {block.name: block for block in graph.blocks}
        self._sizes = {**generic_sizes(graph), **UNSHARDED}

    def main(self) -> None:
        """Note what is copied in a run."""
        graph = self._graph
        values = (*graph.inputs, *graph.constants, *caches.tensors(graph.caches))
        given = [(each.name, each.type) for each in graph.params] + [(each.name, each.type) for each in values]
        frame = {name: strides.contiguous(self._shape(kind)) for name, kind in given}
        for place, step in enumerate(graph.main):
            if isinstance(step, ir.Node):
                self._node(("", place), step, frame)
                continue
            block = self._blocks[step.block]
            local = {name: frame[bound] for name, bound in step.args.items()}
            for inner, node in enumerate(block.nodes):
                self._node((block.name, inner), node, local)
            frame |= {value.name: local[name] for value, name in zip(step.outputs, block.outputs, strict=True)}

    def _node(self, place: tuple[str, int], node: ir.Node, frame: dict[str, Layout]) -> None:
        if node.op == "aten.linear.default" and not self._is_multiplied(node, frame):
            self._found[place] = "input"
        for value in node.outputs:
            shape = self._shape(value.type)
            frame[value.name] = strides.contiguous(shape)
            if node.op in VIEWS and (view := self._view(node, frame, shape)) is not None:
                frame[value.name] = view
            elif node.op == "aten.reshape.default":
                self._found[place] = "self"

    def _is_multiplied(self, node: ir.Node, frame: Mapping[str, Layout]) -> bool:
        """Whether a linear layer's input lies so that a library multiplies it."""
        source = node.args["input"]
        assert isinstance(source, ir.Ref), "verified: a tensor"
        axes = [each for each in zip(*frame[source.name], strict=True) if each[0] != 1]
        steps = [step for _, step in axes]
        if not steps or frame[source.name].strides[-1] == 1:
            return True
        return node.outputs[0].type.dtype != "float32" and 1 in steps

    def _view(self, node: ir.Node, frame: Mapping[str, Layout], shape: tuple[int, ...]) -> Layout | None:
        """How the result lies in the argument's memory; None for one in its own, in row-major order."""
        view = view_of(node, frame[next(references(node.args))], shape, self._number)
        return None if view is None else view.layout

    def _shape(self, kind: ir.TensorType) -> tuple[int, ...]:
        return tuple(symbols.evaluate(size, self._sizes) for size in kind.shape)

    def _number(self, arg: ir.Arg) -> int:
        if isinstance(arg, ir.Dim):
            return symbols.evaluate(arg.expr, self._sizes)
        assert isinstance(arg, ir.Const), "verified: an integer"
        assert isinstance(arg.value, int), "verified: an integer"
        return arg.value
