"""A step as the list of what it launches, for sizes that are known: which kernels, on which grids, with what arguments.

It is what `precast.kernels.launch` does with torch's tensors, worked out beforehand: the graph is walked as the loader
runs it, each value with the layout that it has then. No torch: kernels are compiled ahead from this list, and a backend
without torch launches it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from precast.ir.graph import symbols
from precast.ir.graph.infer import named_references, references
from precast.ir.graph.schema import (
    Arg,
    Block,
    Call,
    Const,
    Dim,
    Dtype,
    Expr,
    Graph,
    Node,
    Ref,
    TensorType,
    Value,
)
from precast.ir.memory import addresses, caches, strides
from precast.ir.memory.strides import Layout
from precast.ir.memory.views import view_of
from precast.ir.weights.tensorfile import element_bytes
from precast.kernels.choices import Case, case_for, cases, fastest
from precast.kernels.embedding.known_ids import launches as known_ids
from precast.kernels.launch_key import forms, launch_key
from precast.kernels.records import Launch, Pointer, Record, Stride
from precast.kernels.sampling.limits import PARAMETERS, SAMPLE_VERSION
from precast.kernels.use import Target, Use, statics_in, types_in, use_of

Sizes = Mapping[str, int]


class Memory(NamedTuple):
    """What a tensor's elements lie in: what is bound by name (`static`: params, constants, cache tensors), an `input`
    of the step, a `value` that some op makes, or the `workspace` of a node.

    Of a value, `function` is the block that makes it, empty for `main` and for what a block returns: that lies where
    `main` says.
    """

    kind: str
    name: str
    function: str = ""


class Held(NamedTuple):
    """A tensor of a step: its type, where its elements lie, in which memory, and from which byte of it on."""

    type: TensorType
    layout: Layout
    memory: Memory
    offset: int = 0


class Address(NamedTuple):
    """An argument that is a pointer: a byte of some memory."""

    memory: Memory
    offset: int


class LaunchAt(NamedTuple):
    """A launch of a step. `args` are those of the launch, in its order; `key`, which is made of their `forms`
    (`precast.kernels.launch_key`), finds its compiled kernel (`precast.ir.native`). A library's has neither."""

    launch: Launch
    key: str
    forms: tuple[str, ...]
    grid: tuple[int, int, int]
    args: tuple[Address | int | float | None, ...]

    def values(self) -> list[int]:
        """The arguments as numbers that conditions on kernels are asked of; memory begins at a multiple of 16."""
        return [arg.offset if isinstance(arg, Address) else arg if isinstance(arg, int) else 0 for arg in self.args]


class NodeAt(NamedTuple):
    """A node as it runs: what computes it, its tensors by the names that launches give them, and its launches.

    Without launches the record names a function, or the result is a view of an argument. `within` are launches that
    such a function makes between others' kernels, of its first rows.
    """

    node: Node
    record: Record
    tensors: Mapping[str, Held]
    launches: tuple[LaunchAt, ...]
    within: tuple[LaunchAt, ...] = ()


def step_launches(graph: Graph, target: Target, sizes: Sizes) -> Iterator[NodeAt]:
    """The nodes of a step in their order, of a graph that is bound to its world. `sizes` are of all its symbols."""
    return GraphLaunches(graph, target).step(sizes)


def drawing_launches(logits: TensorType, target: Target, num_rows: int, *, captured: bool) -> tuple[LaunchAt, ...]:
    """What draws a token for each of so many rows; `logits` [..., V]. None where torch does it."""
    dtypes: dict[str, Dtype] = {"logits": logits.dtype}
    control = "static" if captured else None
    record = fastest("precast.sample", SAMPLE_VERSION, target, control=control, dtypes=dtypes)  # type: ignore[arg-type]
    if isinstance(record.runs, str):
        return ()
    types = {"logits": TensorType(logits.dtype, (num_rows, logits.shape[-1]))}
    types |= {name: TensorType(dtype, (num_rows,)) for name, dtype in PARAMETERS.items()}
    drawn = Value("tokens", TensorType("int64", (num_rows,)))
    node = Node("precast.sample", {name: Ref(name) for name in types}, (drawn,), SAMPLE_VERSION)
    tensors = {name: _outside(name, kind, "input") for name, kind in types.items()}
    tensors["out.0"] = _outside("tokens", drawn.type, "value")
    return _outside_a_graph(record.runs(use_of(node, types, target)), tensors, {})


def known_ids_launches(target: Target, num_tokens: int) -> tuple[LaunchAt, ...]:
    """What puts the tokens that the step before drew in their places among a step's ids."""
    if target.device != "cuda" or "triton" not in target.kinds:
        return ()
    ids = TensorType("int64", (num_tokens,))
    tensors = {"ids": _outside("ids", ids, "input"), "drawn": _outside("drawn", ids, "input")}
    tensors["out.0"] = _outside("known_ids", ids, "value")
    return _outside_a_graph(known_ids(target.capability >= (9, 0)), tensors, {"T": num_tokens})


def _outside_a_graph(launches: Sequence[Launch], tensors: Mapping[str, Held], sizes: Sizes) -> tuple[LaunchAt, ...]:
    dtypes: dict[str, Dtype] = {name: held.type.dtype for name, held in tensors.items()}
    return tuple(_at(_keyed(launch, dtypes), tensors, sizes) for launch in launches)


def _outside(name: str, kind: TensorType, memory: str) -> Held:
    return Held(kind, strides.contiguous([int(size) for size in kind.shape]), Memory(memory, name))  # type: ignore[arg-type]


class _Keyed(NamedTuple):
    """A launch, and what is known of its kernel."""

    launch: Launch
    key: str
    forms: tuple[str, ...]


class _Chosen(NamedTuple):
    """What computes a node in steps of all sizes, and the launches by record."""

    use: Use
    cases: tuple[Case, ...]
    launches: dict[str, tuple[_Keyed, ...]]
    is_placed: bool


class GraphLaunches:
    """What a graph that is bound to its world launches on a target, in steps of any sizes."""

    def __init__(self, graph: Graph, target: Target) -> None:
        self.graph, self.target = graph, target
        self._blocks = {block.name: block for block in graph.blocks}
        functions: dict[str, Graph | Block] = {"": graph, **self._blocks}
        self._types = {name: types_in(function) for name, function in functions.items()}
        self._statics = {name: statics_in(function) for name, function in functions.items()}
        self._chosen: dict[int, _Chosen] = {}
        self._returned: dict[str, dict[str, int]] = {}

    def step(self, sizes: Sizes) -> Iterator[NodeAt]:
        """The nodes of a step in their order, those of blocks once for each call. `sizes` are of all symbols."""
        return _Walk(self, sizes).main()

    def of(self, node: Node, function: str) -> _Chosen:
        """What computes a node of `main` or of a block."""
        if id(node) not in self._chosen:
            use = use_of(node, self._types[function], self.target, self._statics[function])
            found = cases(use)
            records = {case.choice.record.name: case.choice.record for case in found}
            types: dict[str, Dtype] = {name: operand.type.dtype for name, operand in use.operands.items()}
            types |= {f"out.{i}": value.type.dtype for i, value in enumerate(node.outputs)}
            launches = {
                name: tuple(_keyed(launch, types) for launch in record.runs(use))
                for name, record in records.items()
                if not isinstance(record.runs, str)
            }
            is_placed = any(not record.allocates for record in records.values())
            self._chosen[id(node)] = _Chosen(use, found, launches, is_placed)
        return self._chosen[id(node)]

    def called(self, call: Call) -> tuple[Block, dict[str, str]]:
        """The block that a call runs, and by the value of it what the memory that it lies in is called in `main`."""
        block = self._blocks[call.block]
        if call.block not in self._returned:
            placed = frozenset(
                value.name for node in block.nodes if self.of(node, call.block).is_placed for value in node.outputs
            )
            self._returned[call.block] = addresses.spans_of(block, {call.block: placed}).returned
        return block, {name: call.outputs[index].name for name, index in self._returned[call.block].items()}


class _Walk:
    """One walk over a graph, for sizes that are known."""

    def __init__(self, launches: GraphLaunches, sizes: Sizes) -> None:
        self._launches, self._graph, self._sizes = launches, launches.graph, sizes

    def main(self) -> Iterator[NodeAt]:
        """The nodes of `main`, and of the blocks that it calls."""
        graph = self._graph
        params = [Value(param.name, param.type) for param in graph.params]
        frame = {value.name: self._bound(value, "static") for value in (*params, *graph.constants)}
        frame |= {value.name: self._bound(value, "input") for value in graph.inputs}
        frame |= self._caches()
        for step in graph.main:
            if isinstance(step, Node):
                yield self._node(step, "", frame, {})
            else:
                yield from self._call(step, frame)

    def _call(self, call: Call, frame: dict[str, Held]) -> Iterator[NodeAt]:
        block, names = self._launches.called(call)
        local = {name: frame[bound] for name, bound in call.args.items()}
        for node in block.nodes:
            yield self._node(node, call.block, local, names)
        for value, name in zip(call.outputs, block.outputs, strict=True):
            frame[value.name] = local[name]

    def _node(self, node: Node, function: str, frame: dict[str, Held], returned: Mapping[str, str]) -> NodeAt:
        """The node, whose results are in the frame afterwards. `returned`: what values of a block are in `main`."""
        chosen = self._launches.of(node, function)
        record = case_for(chosen.cases, self._sizes).choice.record
        tensors = {name: frame[value] for name, value in named_references(node.args)}
        for i, value in enumerate(node.outputs):
            memory = Memory("value", returned.get(value.name, value.name), "" if value.name in returned else function)
            frame[value.name] = tensors[f"out.{i}"] = self._result(node, value, frame, memory, record)
        made = tuple(_at(keyed, tensors, self._sizes) for keyed in chosen.launches.get(record.name, ()))
        return NodeAt(node, record, tensors, made, self._within(record, chosen.use))

    def _within(self, record: Record, use: Use) -> tuple[LaunchAt, ...]:
        """What a function launches by itself over a part of a node's rows, as it lies in new memory."""
        if record.within is None:
            return ()
        rows = math.prod(self._numbers(use.result.shape[:-1]))
        (launch,) = record.within.launches(use)
        width = self._numbers(use.result.shape[-1:])[0]
        types = {
            "x": TensorType(use.result.dtype, (rows, 2 * width)),
            "out.0": TensorType(use.result.dtype, (rows, width)),
        }
        tensors = {name: _outside(name, kind, "value") for name, kind in types.items()}
        return _outside_a_graph([launch], tensors, {"T": rows})

    def _result(self, node: Node, value: Value, frame: Mapping[str, Held], memory: Memory, record: Record) -> Held:
        shape = self._numbers(value.type.shape)
        if not record.allocates:
            return Held(value.type, strides.contiguous(shape), memory)
        names = list(references(node.args))
        source = frame[names[0]] if names else None
        if source is not None:
            if node.op == "aten.to.dtype" and source.type.dtype == value.type.dtype:
                return source
            view = view_of(node, source.layout, shape, self._number)
            if view is not None:
                offset = source.offset + view.offset * element_bytes(value.type.dtype)
                return Held(value.type, view.layout, source.memory, offset)
        alike = (frame[name].layout for name in names if frame[name].layout.shape == shape)
        return Held(value.type, strides.made_by(node.op, shape, alike), memory)

    def _caches(self) -> Iterator[tuple[str, Held]]:
        plan = caches.with_slabs(self._graph.caches)
        for group in caches.groups(plan):
            step = caches.page_stride(plan, group.pool)
            for value in (value for slot in group.slots for value in slot.tensors):
                dense = strides.contiguous(self._numbers(value.type.shape))
                pages = Layout(dense.shape, (step // element_bytes(value.type.dtype), *dense.strides[1:]))
                yield value.name, Held(value.type, pages, Memory("static", value.name))

    def _bound(self, value: Value, kind: str) -> Held:
        return Held(value.type, strides.contiguous(self._numbers(value.type.shape)), Memory(kind, value.name))

    def _number(self, arg: Arg) -> int:
        if isinstance(arg, Dim):
            return symbols.evaluate(arg.expr, self._sizes)
        assert isinstance(arg, Const), "verified: an integer"
        assert isinstance(arg.value, int), "verified: an integer"
        return arg.value

    def _numbers(self, shape: Sequence[Expr]) -> tuple[int, ...]:
        return tuple(symbols.evaluate(size, self._sizes) for size in shape)


def _keyed(launch: Launch, dtypes: Mapping[str, Dtype]) -> _Keyed:
    """The launch over tensors of these types."""
    if launch.library:
        return _Keyed(launch, "", ())
    known = forms(launch, lambda pointer: pointer.dtype or dtypes[pointer.tensor])
    return _Keyed(launch, launch_key(launch, known), known)


def _at(keyed: _Keyed, tensors: Mapping[str, Held], sizes: Sizes) -> LaunchAt:
    """The launch with its numbers."""
    launch = keyed.launch
    first, second, third = (*(symbols.evaluate(size, sizes) for size in launch.grid), 1, 1)[:3]
    return LaunchAt(*keyed, (first, second, third), tuple(_value(arg, tensors, sizes) for arg in launch.args))


def _value(
    arg: Pointer | Stride | Expr | float | None, tensors: Mapping[str, Held], sizes: Sizes
) -> Address | int | float | None:
    if isinstance(arg, Pointer):
        begin = symbols.evaluate(arg.offset, sizes)
        if arg.tensor == "workspace":
            return Address(Memory("workspace", ""), begin)
        held = tensors[arg.tensor]
        return Address(held.memory, held.offset + begin)
    if isinstance(arg, Stride):
        return tensors[arg.tensor].layout.strides[arg.axis]
    if arg is None or isinstance(arg, float):
        return arg
    return symbols.evaluate(arg, sizes)
