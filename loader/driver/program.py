"""A graph as launches: for the sizes of a step, which kernels run in which order, over which grids, with which numbers.

All of it is data. A node is either a view, of which only an address and strides are left, or launches that its
implementation's record gives; anything else is not covered (`precast.loader.driver.coverage`). Values lie where
`precast.ir.memory.addresses` has planned them. A block's launches are worked out once for the sizes of a step, and each
of its calls puts its own params, caches and arguments into them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from precast.ir.errors import TargetError
from precast.ir.graph import schema as ir
from precast.ir.graph import symbols as exprs
from precast.ir.graph.infer import named_references, references
from precast.ir.graph.normed_sums import BOTH, SUM
from precast.ir.memory import strides
from precast.ir.memory.addresses import VIEWS, Addresses, spans_of
from precast.ir.memory.strides import Layout
from precast.ir.memory.views import view_of
from precast.ir.weights.tensorfile import element_bytes
from precast.kernels.choices import Case, cases, workspace
from precast.kernels.collectives.launches import norm_after
from precast.kernels.launch_key import forms, launch_key
from precast.kernels.records import Launch, Pointer, Ranges, Record, Stride
from precast.kernels.use import Target, Use, statics_in, types_in, use_of
from precast.loader.device import Buffer, Dim3
from precast.loader.driver.collectives import Collectives, is_collective
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

Sizes = Mapping[str, int]


class Ready(NamedTuple):
    """One launch as numbers: `values` in the order of the launch's arguments, addresses as integers.

    `key` names its kernel (`precast.kernels.launch_key`).
    """

    launch: Launch
    key: str
    grid: Dim3
    values: tuple[Number, ...]


class _Keyed(NamedTuple):
    """A launch, and what names its kernel."""

    launch: Launch
    key: str


class _Way(NamedTuple):
    """The launches of a node in steps of these sizes, and the bytes that they hold beside the results."""

    sizes: Ranges
    launches: tuple[_Keyed, ...]
    workspace: ir.Expr


class _Step(NamedTuple):
    """A node as it runs: in one of several ways, or in none, if it is a view. `tensors`: its arguments by the names
    that launches give them. Where ranks meet, `collectives` say what is launched; `norm`: what norms a sum then."""

    node: ir.Node
    ways: tuple[_Way, ...]
    tensors: Mapping[str, str]
    meets: bool = False
    norm: tuple[_Way, ...] = ()


_Moved = tuple[list[Template], dict[str, tuple[str, int]]]
"""Launches of a block or of a node in `main`; and, for a call, which memory of `main` the names in them stand for, from
which byte on."""


class NativeProgram:
    """A verified graph that is bound to its world, as launches for a target, in steps of at most these sizes.
    `collectives`: how ranks put together what they have; None for one rank.

    Raises NotCoveredError for the first node that is none.
    """

    def __init__(self, graph: ir.Graph, target: Target, most: Sizes, collectives: Collectives | None = None) -> None:
        self._graph = graph
        self.target, self.collectives = target, collectives
        self._blocks = {block.name: block for block in graph.blocks}
        self._types = {"": types_in(graph), **{block.name: types_in(block) for block in graph.blocks}}
        self._steps = {"": steps_of(graph, graph.main, target, most, meets=collectives is not None)}
        self._steps |= {
            block.name: steps_of(block, block.nodes, target, most, meets=collectives is not None)
            for block in graph.blocks
        }
        placed = {name: frozenset(_written(steps)) for name, steps in self._steps.items()}
        self._returned = {block.name: spans_of(block, placed).returned for block in graph.blocks}
        self._results = {name: index for index, name in enumerate(graph.outputs.values())}

    @cached_property
    def symbols(self) -> frozenset[str]:
        """The sizes of a step on which its launches depend."""
        found: set[str] = set()
        for function, steps in self._steps.items():
            for step in steps:
                for expr in _expressions(step, self._types[function]):
                    found |= exprs.free_symbols(expr)
        return frozenset(found)

    @property
    def ends(self) -> Mapping[str, set[int]]:
        """By symbol, the sizes at which the classes begin and end that its choices tell apart."""
        found: dict[str, set[int]] = {}
        for way in (way for steps in self._steps.values() for step in steps for way in step.ways):
            for symbol, (low, high) in way.sizes.items():
                found.setdefault(symbol, set()).update({low} if high is None else {low, high})
        return found

    def workspace_bytes(self, sizes: Sizes) -> int:
        """What the launches hold at most beside results, in steps of up to these sizes."""
        found = [0]
        for steps in self._steps.values():
            for way in (way for step in steps for way in (*step.ways, *step.norm)):
                most = {name: size if (high := way.sizes.get(name, (0, None))[1]) is None else min(size, high)
                        for name, size in sizes.items()}  # fmt: skip
                found.append(exprs.evaluate(way.workspace, most))
        return max(found)

    def output_bytes(self, name: str, sizes: Sizes) -> int:
        """The size of one of the graph's outputs."""
        kind = self._types[""][self._graph.outputs[name]]
        return element_bytes(kind.dtype) * math.prod(exprs.evaluate(size, sizes) for size in kind.shape)

    def launches(self) -> Iterator[_Keyed]:
        """All that may run, those of a block once."""
        for steps in self._steps.values():
            yield from (each for step in steps for way in (*step.ways, *step.norm) for each in way.launches)
        if self.collectives is not None:
            yield from (_Keyed(*each) for each in self.collectives.launched(self._graph))

    def ready(
        self, sizes: Sizes, memory: Mapping[str, Buffer], addresses: Addresses
    ) -> tuple[list[Ready], dict[str, Placed]]:
        """The launches of a step, in their order; and where its outputs lie.

        `memory` has params, constants, caches and inputs by name, and `ACTIVATIONS`, `WORKSPACE` and the outputs'.
        Raises NotCoveredError for a reshape that would have to copy.
        """
        templates, outputs = self._templates(sizes, memory, addresses)
        base = {name: buffer.pointer for name, buffer in memory.items()}
        return [each for made, moved in templates for each in _filled(made, moved, base)], outputs

    def ready_once(self, sizes: Sizes, memory: Mapping[str, Buffer], addresses: Addresses) -> Iterator[Ready]:
        """As `ready`, over memory that lies all at one address: of calls whose launches are then equal, those of the
        first."""
        base = {name: buffer.pointer for name, buffer in memory.items()}
        assert len({*base.values()}) <= 1, "memory lies at one address"
        seen = set()
        for made, moved in self._templates(sizes, memory, addresses)[0]:
            key = id(made), tuple([offset for _, offset in moved.values()])
            if key not in seen:
                seen.add(key)
                yield from _filled(made, moved, base)

    def _templates(
        self, sizes: Sizes, memory: Mapping[str, Buffer], addresses: Addresses
    ) -> tuple[list[_Moved], dict[str, Placed]]:
        """The launches of a step and where its outputs lie, before addresses are known."""
        run = _Run(self, {**sizes}, addresses)
        frame = {
            name: Placed(name, 0, buffer.dtype, Layout(buffer.shape, buffer.strides)) for name, buffer in memory.items()
        }
        templates: list[_Moved] = []
        for item in self._graph.main:
            if isinstance(item, ir.Call):
                templates.append(run.call(item, frame))
            else:
                step = self._steps[""][run.position]
                run.position += 1
                made: list[Template] = []
                run.node("", step, frame, made)
                templates.append((made, {}))
        return templates, {name: frame[value] for name, value in self._graph.outputs.items()}


class _Run:
    """The working out of one step: sizes are numbers."""

    def __init__(self, program: NativeProgram, sizes: dict[str, int], addresses: Addresses) -> None:
        self._program, self._sizes, self._addresses = program, sizes, addresses
        self._known: dict[ir.Expr, int] = {}
        self._blocks: dict[tuple[Any, ...], tuple[list[Template], list[Placed]]] = {}
        self.position = 0

    def number(self, expr: ir.Expr) -> int:
        if isinstance(expr, int):
            return expr
        if expr not in self._known:
            self._known[expr] = exprs.evaluate(expr, self._sizes)
        return self._known[expr]

    def shape(self, kind: ir.TensorType) -> tuple[int, ...]:
        return tuple(map(self.number, kind.shape))

    def call(self, call: ir.Call, frame: dict[str, Placed]) -> tuple[list[Template], dict[str, tuple[str, int]]]:
        """The block's launches, and where the names in them lie for this call."""
        block = self._program._blocks[call.block]
        given = {name: frame[bound] for name, bound in call.args.items()}
        key = (call.block, tuple((name, each.dtype, each.layout) for name, each in given.items()))
        if key not in self._blocks:
            local = {name: Placed(name, 0, each.dtype, each.layout) for name, each in given.items()}
            made: list[Template] = []
            for step in self._program._steps[call.block]:
                self.node(call.block, step, local, made)
            self._blocks[key] = made, [local[name] for name in block.outputs]
        made, results = self._blocks[key]
        moved = {name: (each.base, each.offset) for name, each in given.items()}
        for index in set(self._program._returned[call.block].values()):
            moved[f"<result {index}>"] = self._place("", call.outputs[index].name)
        for value, result in zip(call.outputs, results, strict=True):
            base, offset = moved.get(result.base, (result.base, 0))
            frame[value.name] = result._replace(base=base, offset=offset + result.offset)
        return made, moved

    def node(self, function: str, step: _Step, frame: dict[str, Placed], made: list[Template]) -> None:
        """The node's launches go to `made`, its results to `frame`."""
        node = step.node
        if not step.ways:
            (value,) = node.outputs
            frame[value.name] = self._view(node, frame[next(references(node.args))], self.shape(value.type))
            return
        tensors = {name: frame[value] for name, value in step.tensors.items()}
        for i, value in enumerate(node.outputs):
            dtype, layout = value.type.dtype, strides.contiguous(self.shape(value.type))
            frame[value.name] = tensors[f"out.{i}"] = Placed(*self._place(function, value.name), dtype, layout)
        if step.meets:
            self._together(step, tensors, made)
        else:
            self._launched(step.ways, tensors, made)

    def _together(self, step: _Step, tensors: dict[str, Placed], made: list[Template]) -> None:
        """What ranks put together."""
        node, collectives = step.node, self._program.collectives
        assert collectives is not None, "only ranks meet"
        if node.op == SUM:
            made += collectives.summed(node, tensors)
        elif node.op != BOTH:
            made += collectives.gathered(node, tensors)
        else:
            found, total = collectives.normed(node, tensors)
            made += found
            if total is not None:
                self._launched(step.norm, {**tensors, "x": total}, made)

    def _launched(self, ways: Sequence[_Way], tensors: Mapping[str, Placed], made: list[Template]) -> None:
        """The launches of that of the ways which takes a step of these sizes."""
        way = next(way for way in ways if self._is_within(way.sizes))
        for launch, key in way.launches:
            x, y, z = map(self.number, (*launch.grid, 1, 1)[:3])
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
            offset = self.number(arg.offset)
            if arg.tensor == "workspace":
                return At(WORKSPACE, offset)
            tensor = tensors[arg.tensor]
            return At(tensor.base, tensor.offset + offset)
        if isinstance(arg, Stride):
            return tensors[arg.tensor].layout.strides[arg.axis]
        if isinstance(arg, (str, ir.Apply)):
            return self.number(arg)
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
            return self.number(arg.expr)
        assert isinstance(arg, ir.Const), "verified: an integer"
        assert isinstance(arg.value, int), "verified: an integer"
        return arg.value


# --- nodes as steps ------------------------------------------------------------------------------------------------


def steps_of(
    function: ir.Graph | ir.Block, items: Iterable[ir.Node | ir.Call], target: Target, most: Sizes, *,
    meets: bool = False,
) -> list[_Step]:  # fmt: skip
    """The nodes of `main` or of a block as they run; whether ranks meet in some. Raises NotCoveredError for one that is
    neither launches nor a view."""
    types, statics = types_in(function), statics_in(function)
    nodes = [item for item in items if isinstance(item, ir.Node)]
    found = []
    for node in nodes:
        use = use_of(node, types, target, statics)
        if not (meets and is_collective(node)):
            found.append(_step(node, types, use, most))
            continue
        norm = norm_after(node) if node.op == BOTH else None
        ways = () if norm is None else _step(norm, types, use_of(norm, types, target, statics), most).ways
        how = _Way({}, (), workspace(use))
        found.append(_Step(node, (how,), dict(named_references(node.args)), meets=True, norm=ways))
    return found


def _step(node: ir.Node, types: Mapping[str, ir.TensorType], use: Use, most: Sizes) -> _Step:
    if is_view(use):
        return _Step(node, (), {})
    tensors = dict(named_references(node.args))
    kinds: dict[str, ir.Dtype] = {name: types[value].dtype for name, value in tensors.items()}
    kinds |= {f"out.{i}": value.type.dtype for i, value in enumerate(node.outputs)}
    known: dict[str, tuple[_Keyed, ...]] = {}
    ways = []
    for case in covered_cases(use, most):
        record = case.choice.record
        if record.name not in known:
            known[record.name] = keyed(record, use, kinds)
        ways.append(_Way(case.sizes, known[record.name], record.workspace(use)))
    return _Step(node, tuple(ways), tensors)


def is_view(use: Use) -> bool:
    """Whether the node's result is its argument, seen in another way."""
    if use.node.op == "aten.to.dtype":
        return use.operands["self"].type.dtype == use.result.dtype
    return use.node.op in VIEWS


def covered_cases(use: Use, most: Sizes) -> list[Case]:
    """The cases of a use in steps of at least one token, sequence and row of logits, and at most so many.

    Raises NotCoveredError where one of them runs anything but launches.
    """
    try:
        chosen = cases(use)
    except TargetError:  # nothing does it without torch
        chosen = cases(use._replace(target=use.target._replace(kinds=use.target.kinds | {"torch"})))
    found = []
    for case in chosen:
        if any(high == 0 or low > most[symbol] for symbol, (low, high) in case.sizes.items()):
            continue
        record = case.choice.record
        if isinstance(record.runs, str):
            where = " and ".join(
                f"{symbol} {low} to {'any' if high is None else high}" for symbol, (low, high) in case.sizes.items()
            )
            raise NotCoveredError(f"{use.node.op} of {use.dtype} is computed by {record.name}{where and f' ({where})'}")
        found.append(case)
    return found


def keyed(record: Record, use: Use, kinds: Mapping[str, ir.Dtype]) -> tuple[_Keyed, ...]:
    """A record's launches of a use, with what names their kernels; `kinds` are the element types of its tensors."""
    assert not isinstance(record.runs, str), f"{record.name} names a function"

    def dtype_of(pointer: Pointer) -> ir.Dtype:
        return pointer.dtype or ("uint8" if pointer.tensor == "workspace" else kinds[pointer.tensor])

    return tuple(
        _Keyed(launch, "" if launch.library else launch_key(launch, forms(launch, dtype_of)))
        for launch in record.runs(use)
    )


def _filled(made: Iterable[Template], moved: Mapping[str, tuple[str, int]], base: Mapping[str, int]) -> Iterator[Ready]:
    """Launches with the addresses that their names stand for; those of memory are `base`."""
    at = {**base, **{name: base[outer] + offset for name, (outer, offset) in moved.items()}} if moved else base
    for each in made:
        values = tuple([at[v[0]] + v[1] if type(v) is At else v for v in each.values])
        yield Ready(each.launch, each.key, each.grid, values)  # type: ignore[arg-type]


def _written(steps: Sequence[_Step]) -> Iterator[str]:
    """The results that launches write."""
    return (value.name for step in steps if step.ways for value in step.node.outputs)


def _expressions(step: _Step, types: Mapping[str, ir.TensorType]) -> Iterator[ir.Expr]:
    """What a step's numbers are worked out from."""
    yield from (size for value in step.node.outputs for size in value.type.shape)
    for arg in step.node.args.values():
        for item in arg.items if isinstance(arg, ir.Items) else (arg,):
            if isinstance(item, ir.Dim):
                yield item.expr
    for way in (*step.ways, *step.norm):
        yield from way.sizes
        for launch, _ in way.launches:
            yield from launch.grid
            for given in launch.args:
                if isinstance(given, (str, ir.Apply)):
                    yield given
                elif isinstance(given, Pointer):
                    yield given.offset
                elif isinstance(given, Stride) and given.tensor in step.tensors:
                    yield from types[step.tensors[given.tensor]].shape[1:]
