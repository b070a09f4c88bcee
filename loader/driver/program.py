"""A graph as launches: for the sizes of a step, which kernels run in which order, over which grids, with which numbers.

All of it is data. A node is either a view, of which only an address and strides are left, or launches that its
implementation's record gives (`precast.loader.driver.node_ways`); anything else is not covered
(`precast.loader.driver.coverage`). Values lie where `precast.ir.memory.addresses` has planned them. A block's launches
are worked out once for the sizes of a step, and each of its calls puts its own params, caches and arguments into them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from precast.ir.graph import schema as ir
from precast.ir.graph import symbols as exprs
from precast.ir.graph.infer import references
from precast.ir.graph.normed_sums import BOTH, SUM
from precast.ir.memory import strides
from precast.ir.memory.addresses import Addresses, spans_of
from precast.ir.memory.strides import Layout
from precast.ir.memory.views import view_of
from precast.ir.weights.tensorfile import element_bytes
from precast.kernels.records import Launch, Pointer, Ranges, Stride
from precast.kernels.use import Target, types_in
from precast.loader.device import Buffer, Dim3
from precast.loader.driver.collectives import Collectives
from precast.loader.driver.node_ways import Keyed, Known, RunNode, Sizes, Way, expressions, nodes_of
from precast.loader.driver.placed import (
    ACTIVATIONS,
    OUTPUT,
    WORKSPACE,
    At,
    NotCoveredError,
    Number,
    Placed,
    Template,
)


class Ready(NamedTuple):
    """One launch as numbers: `values` in the order of the launch's arguments, addresses as integers.

    `key` names its kernel (`precast.kernels.launch_key`).
    """

    launch: Launch
    key: str
    grid: Dim3
    values: tuple[Number, ...]


class RunCall(NamedTuple):
    """A call of a block as it runs. `memory`: by the block's names, the params, constants, caches and inputs that it is
    given. `others`: by the block's names, in their order, values that `main` makes. `alike` is equal in calls of one
    block that are given memory of equal types by the same names."""

    call: ir.Call
    alike: int
    memory: Mapping[str, str]
    others: Sequence[tuple[str, str]]


Launching = tuple[RunCall | None, RunNode]
"""A node of the block that is called, or of `main`."""
_Moved = Mapping[str, tuple[str, int]]
"""For a call, where those of the names in a block's launches lie that aren't in `RunCall.memory`: in which memory of
`main`, from which byte on."""


class NativeProgram:
    """A verified graph that is bound to its world, as launches for a target, in steps of at most these sizes.
    `collectives`: how ranks put together what they have; None for one rank.

    Raises NotCoveredError for the first node that is none.
    """

    def __init__(self, graph: ir.Graph, target: Target, most: Sizes, collectives: Collectives | None = None) -> None:
        self._graph = graph
        self.target, self.collectives = target, collectives
        self._blocks = {block.name: block for block in graph.blocks}
        functions: dict[str, ir.Graph | ir.Block] = {"": graph, **self._blocks}
        meets = collectives is not None
        self._types = {name: types_in(function) for name, function in functions.items()}
        known: Known = {}
        self._nodes = {
            name: nodes_of(function, target, most, known, meets=meets) for name, function in functions.items()
        }
        self._main = list(self._items())
        self._made_by: dict[str, dict[str, tuple[RunNode | RunCall, int]]] = {
            name: {value.name: (node, i) for node in nodes for i, value in enumerate(node.node.outputs)}
            for name, nodes in self._nodes.items()
        }
        for item in self._main:
            if isinstance(item, RunCall):
                self._made_by[""].update({value.name: (item, i) for i, value in enumerate(item.call.outputs)})
        self._returned = {block.name: spans_of(block, self.written).returned for block in graph.blocks}

    def _items(self) -> Iterator[RunNode | RunCall]:
        """`main`, in its order."""
        nodes, types = iter(self._nodes[""]), self._types[""]
        made = {value.name for item in self._graph.main for value in item.outputs}
        kinds: dict[object, int] = {}
        for item in self._graph.main:
            if isinstance(item, ir.Node):
                yield next(nodes)
                continue
            memory = {name: bound for name, bound in item.args.items() if bound not in made}
            kind = item.block, tuple([(name, types[memory[name]]) for name in sorted(memory)])
            others = sorted((name, bound) for name, bound in item.args.items() if bound in made)
            yield RunCall(item, kinds.setdefault(kind, len(kinds)), memory, others)

    @cached_property
    def written(self) -> Mapping[str, frozenset[str]]:
        """The results that launches write: of `main`, by "", and of blocks by their names."""
        return {
            name: frozenset(value.name for node in nodes if node.ways for value in node.node.outputs)
            for name, nodes in self._nodes.items()
        }

    @cached_property
    def symbols(self) -> frozenset[str]:
        """The sizes of a step on which its launches depend."""
        found: set[str] = set()
        for function, nodes in self._nodes.items():
            for node in nodes:
                for expr in expressions(node, self._types[function]):
                    found |= exprs.free_symbols(expr)
        return frozenset(found)

    def classes(self, is_wanted: Callable[[Keyed], bool]) -> Iterator[tuple[Ranges, list[Launching]]]:
        """The classes of sizes that choices tell apart, and the nodes that run in a way of their own in each, with a
        launch that `is_wanted`. Of calls that are alike, those of the first."""
        alike = {item.alike: item for item in reversed(self._main) if isinstance(item, RunCall)}
        functions: list[tuple[RunCall | None, Sequence[RunNode]]] = [(None, self._nodes[""])]
        functions += [(first, self._nodes[first.call.block]) for first in alike.values()]
        found: defaultdict[tuple[Any, ...], list[Launching]] = defaultdict(list)
        for first, nodes in functions:
            for node in nodes:
                ways = (
                    way for way in (*node.ways, *node.norm) if node.meets or any(map(is_wanted, way.launches))
                )  # fmt: skip
                for sizes in dict.fromkeys(tuple(sorted(way.sizes.items())) for way in ways):
                    found[sizes].append((first, node))
        return ((dict(sizes), launching) for sizes, launching in found.items())

    def workspace_bytes(self, sizes: Sizes) -> int:
        """What the launches hold at most beside results, in steps of up to these sizes."""
        found = [0]
        for way in self._ways():
            most = {name: size if (high := way.sizes.get(name, (0, None))[1]) is None else min(size, high)
                    for name, size in sizes.items()}  # fmt: skip
            found.append(exprs.evaluate(way.workspace, most))
        return max(found)

    def output_bytes(self, name: str, sizes: Sizes) -> int:
        """The size of one of the graph's outputs."""
        kind = self._types[""][self._graph.outputs[name]]
        return element_bytes(kind.dtype) * math.prod(exprs.evaluate(size, sizes) for size in kind.shape)

    def launches(self) -> Iterator[Keyed]:
        """All that may run, those of a block once."""
        yield from (each for way in self._ways() for each in way.launches)
        if self.collectives is not None:
            yield from (Keyed(*each) for each in self.collectives.launched(self._graph))

    def _ways(self) -> Iterator[Way]:
        return (way for nodes in self._nodes.values() for node in nodes for way in (*node.ways, *node.norm))

    def ready(
        self, sizes: Sizes, memory: Mapping[str, Buffer], addresses: Addresses
    ) -> tuple[list[Ready], dict[str, Placed]]:
        """The launches of a step, in their order; and where its outputs lie.

        `memory` has params, constants, caches and inputs by name, and `ACTIVATIONS`, `WORKSPACE` and the outputs'.
        Raises NotCoveredError for a reshape that would have to copy.
        """
        run = _Run(self, sizes, memory, addresses)
        ready = [each for item in self._main for each in run.filled(run.launched(item), item)]
        return ready, {name: run.main[value] for name, value in self._graph.outputs.items()}

    def ready_alone(
        self, launching: Iterable[Launching], sizes: Sizes, memory: Mapping[str, Buffer], addresses: Addresses
    ) -> Iterator[Ready]:
        """What these nodes launch in a step, as `ready` says; those of a call in all calls that are alike and whose
        other arguments lie differently."""
        run = _Run(self, sizes, memory, addresses)
        calls: defaultdict[int, dict[tuple[Any, ...], RunCall]] = defaultdict(dict)
        for item in self._main:  # in their order, so that no value is looked for through all calls before it
            if isinstance(item, RunCall):
                frame, moved = run.called(item)
                calls[item.alike].setdefault((id(frame), *[offset for _, offset in moved.values()]), item)
        for first, node in launching:
            for call in [None] if first is None else calls[first.alike].values():
                made: list[Template] = []
                run.node(run.main if call is None else run.called(call)[0], node, made)
                yield from run.filled(made, call or node)


class _Frame(dict[str, Placed]):
    """Where the values of a function lie in a step, each worked out when it is first asked for; and its launches, once
    they are. `args`: of a block, which values of `main` its arguments are."""

    def __init__(self, run: _Run, function: str, args: Mapping[str, str]) -> None:
        super().__init__()
        self._run, self.function, self.args = run, function, args
        self.launches: list[Template] | None = None

    def __missing__(self, name: str) -> Placed:
        self[name] = found = self._run.placed(self, name)
        return found


class _Run:
    """The working out of one step: sizes are numbers."""

    def __init__(
        self, program: NativeProgram, sizes: Sizes, memory: Mapping[str, Buffer], addresses: Addresses
    ) -> None:
        self._program, self._sizes, self._memory, self._addresses = program, {**sizes}, memory, addresses
        self._known: dict[ir.Expr, int] = {}
        self._frames: dict[tuple[Any, ...], _Frame] = {}
        self._called: dict[int, tuple[_Frame, _Moved]] = {}
        self.main = _Frame(self, "", {})

    def launched(self, item: RunNode | RunCall) -> list[Template]:
        """What an item of `main` launches."""
        if isinstance(item, RunNode):
            made: list[Template] = []
            self.node(self.main, item, made)
            return made
        frame, _ = self.called(item)
        if frame.launches is None:
            frame.launches = []
            for node in self._program._nodes[frame.function]:
                self.node(frame, node, frame.launches)
        return frame.launches

    def called(self, item: RunCall) -> tuple[_Frame, _Moved]:
        """Where values of the block lie, by names that are its own; and what those are in this call."""
        if id(item) not in self._called:
            call, main = item.call, self.main
            others = {name: main[bound] for name, bound in item.others}
            key = item.alike, *[(each.dtype, each.layout) for each in others.values()]
            if key not in self._frames:
                self._frames[key] = _Frame(self, call.block, call.args)
            moved = {name: (each.base, each.offset) for name, each in others.items()}
            for index in {*self._program._returned[call.block].values()}:
                moved[f"<result {index}>"] = self._place("", call.outputs[index].name)
            self._called[id(item)] = self._frames[key], moved
        return self._called[id(item)]

    def filled(self, made: Iterable[Template], item: RunNode | RunCall) -> Iterator[Ready]:
        """The launches of an item of `main` with the addresses that their names stand for."""
        at = _Addresses(self._memory, {} if isinstance(item, RunNode) else item.memory)
        if isinstance(item, RunCall):
            _, moved = self.called(item)
            at.update({name: self._memory[base].pointer + offset for name, (base, offset) in moved.items()})
        for each in made:
            values = tuple([at[v[0]] + v[1] if type(v) is At else v for v in each.values])
            yield Ready(each.launch, each.key, each.grid, values)  # type: ignore[arg-type]

    def placed(self, frame: _Frame, name: str) -> Placed:
        """Where a value lies that a node or a call makes; or what `main` is given."""
        made_by = self._program._made_by[frame.function].get(name)
        if made_by is None and name in frame.args:
            return self.main[frame.args[name]]._replace(base=name, offset=0)
        if made_by is None:
            buffer = self._memory[name]
            return Placed(name, 0, buffer.dtype, Layout(buffer.shape, buffer.strides))
        item, index = made_by
        if isinstance(item, RunCall):
            inner, moved = self.called(item)
            result = inner[self._program._blocks[item.call.block].outputs[index]]
            base, offset = moved.get(result.base, (item.memory.get(result.base, result.base), 0))
            return result._replace(base=base, offset=offset + result.offset)
        kind = item.node.outputs[index].type
        shape = tuple(map(self._number, kind.shape))
        if not item.ways:
            return self._view(item.node, frame[next(references(item.node.args))], shape)
        return Placed(*self._place(frame.function, name), kind.dtype, strides.contiguous(shape))

    def node(self, frame: _Frame, node: RunNode, made: list[Template]) -> None:
        """The node's launches go to `made`."""
        tensors = {name: frame[value] for name, value in node.tensors.items()}
        tensors |= {f"out.{i}": frame[value.name] for i, value in enumerate(node.node.outputs)}
        if node.meets:
            self._together(node, tensors, made)
        elif node.ways:
            self._launched(node.ways, tensors, made)

    def _together(self, run: RunNode, tensors: dict[str, Placed], made: list[Template]) -> None:
        """What ranks put together."""
        node, collectives = run.node, self._program.collectives
        assert collectives is not None, "only ranks meet"
        if node.op == SUM:
            made += collectives.summed(node, tensors)
        elif node.op != BOTH:
            made += collectives.gathered(node, tensors)
        else:
            found, total = collectives.normed(node, tensors)
            made += found
            if total is not None:
                self._launched(run.norm, {**tensors, "x": total}, made)

    def _launched(self, ways: Sequence[Way], tensors: Mapping[str, Placed], made: list[Template]) -> None:
        """The launches of that of the ways which takes a step of these sizes."""
        way = next(way for way in ways if self._is_within(way.sizes))
        for launch, key in way.launches:
            x, y, z = map(self._number, (*launch.grid, 1, 1)[:3])
            if x and y and z:
                values = tuple([self._value(arg, tensors) for arg in launch.args])
                made.append(Template(launch, key, (x, y, z), values))

    def _is_within(self, sizes: Ranges) -> bool:
        return all(
            low <= self._sizes[name] and (high is None or self._sizes[name] <= high)
            for name, (low, high) in sizes.items()
        )

    def _place(self, function: str, name: str) -> tuple[str, int]:
        """Where a value of a function is written."""
        addresses = self._addresses.blocks[function] if function else self._addresses.main
        if name in addresses:
            return ACTIVATIONS, addresses[name]
        if function:
            returned = self._program._returned[function]
            if name in returned:
                return f"<result {returned[name]}>", 0
        elif name in self._program._graph.outputs.values():
            return OUTPUT + name, 0
        raise NotCoveredError(f"{name} has no address: its size depends on more than tokens and sequences")

    def _value(self, arg: object, tensors: Mapping[str, Placed]) -> Number | At:
        if isinstance(arg, Pointer):
            offset = self._number(arg.offset)
            if arg.tensor == "workspace":
                return At(WORKSPACE, offset)
            tensor = tensors[arg.tensor]
            return At(tensor.base, tensor.offset + offset)
        if isinstance(arg, Stride):
            return tensors[arg.tensor].layout.strides[arg.axis]
        if isinstance(arg, (str, ir.Apply)):
            return self._number(arg)
        assert arg is None or isinstance(arg, (int, float)), f"{arg!r} is no argument of a launch"
        return arg

    def _view(self, node: ir.Node, of: Placed, shape: tuple[int, ...]) -> Placed:
        """The result of a node that moves nothing."""
        if node.op == "aten.to.dtype":
            return of
        view = view_of(node, of.layout, shape, self._of)
        if view is None:
            raise NotCoveredError(f"{node.op} of {of.dtype} copies {list(of.layout.shape)} to {list(shape)}")
        return Placed(of.base, of.offset + view.offset * element_bytes(of.dtype), of.dtype, view.layout)

    def _of(self, arg: ir.Arg) -> int:
        if isinstance(arg, ir.Dim):
            return self._number(arg.expr)
        assert isinstance(arg, ir.Const), "verified: an integer"
        assert isinstance(arg.value, int), "verified: an integer"
        return arg.value

    def _number(self, expr: ir.Expr) -> int:
        if isinstance(expr, int):
            return expr
        if expr not in self._known:
            self._known[expr] = exprs.evaluate(expr, self._sizes)
        return self._known[expr]


class _Addresses(dict[str, int]):
    """Where memory begins, by its name, or by one of `names` that stands for it."""

    def __init__(self, memory: Mapping[str, Buffer], names: Mapping[str, str]) -> None:
        super().__init__()
        self._memory, self._names = memory, names

    def __missing__(self, name: str) -> int:
        self[name] = found = self._memory[self._names.get(name, name)].pointer
        return found
