"""The graph as a callable: the only way from the IR to something that runs.

A function of the graph (`main` or a block) becomes a list of instructions over a frame, a list of registers. All names
are resolved here; a run touches none. A block is compiled once, and each of its calls runs the same instructions over a
frame of its own, which begins as a copy of that call's template: parameters, constants and cache tensors stand in it
from `Program.bind` on. What depends on nothing but the sizes is computed before the first instruction, and kept for the
next run of the same sizes: integers, and the tensors that results are written into, at the addresses that were planned
for them. What has no address is new memory, and its register is emptied after the last use, so that it is free as soon
as the value is dead.

Nothing is traced, generated or evaluated from text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from precast.ir.errors import BundleError, RequestError, TargetError
from precast.ir.graph import schema as ir
from precast.ir.graph import symbols as exprs
from precast.ir.memory import caches
from precast.ir.memory.addresses import Addresses, spans_of
from precast.ir.ops import table as ops
from precast.kernels import dtypes
from precast.kernels.collectives.group import Group
from precast.kernels.registry import Implementation, implementations, target_of
from precast.kernels.use import Target, Use, statics_in, types_in, use_of
from precast.loader.program import instructions
from precast.loader.program.binding import Binding, Sizes
from precast.loader.program.instructions import Action, Frame, HostCall, Instructions, Out, Registers

Choose = Callable[[Use], Sequence[Implementation]]
Groups = Mapping[str, Group]
"""What connects this rank with others, by the names that collectives have for it."""


def restore(
    graph: ir.Graph,
    *,
    device: torch.device,
    choose: Choose = implementations,
    target: Target | None = None,
    groups: Groups = MappingProxyType({}),
) -> Program:
    """The program of a verified graph on `device`; its params, constants and cache tensors are bound afterwards.

    `choose` gives the implementations of each node; another one can watch what it runs. `target` is what the device is;
    None: with the choices that come with Precast for it. `groups` connect this rank with the others, by the names that
    collectives in the graph have for them; a graph that is bound to one rank has none.

    Raises BundleError (op-unknown) for an op that this release does not have, and (symbol-unbound) for a symbol to
    which no tensor's shape gives a value; TargetError (implementation-missing) for a node that nothing computes there,
    and (group-missing) for a collective whose group is not among `groups`.
    """
    return Program(graph, device, choose, target, groups)


class Program:
    """A graph that runs: bound to tensors once, called with the inputs of each step."""

    def __init__(
        self,
        graph: ir.Graph,
        device: torch.device,
        choose: Choose = implementations,
        target: Target | None = None,
        groups: Groups = MappingProxyType({}),
    ) -> None:
        # With its index: "cuda" is not equal to the "cuda:0" that tensors say they are on.
        self.device = device = torch.empty(0, device=device).device
        self.inputs: tuple[ir.Value, ...] = graph.inputs
        self._symbols = graph.symbols
        params = [ir.Value(param.name, param.type) for param in graph.params]
        statics = (*params, *graph.constants, *caches.tensors(graph.caches))  # what `bind` is given, in this order
        self._statics = {value.name: value for value in statics}
        self._tensors: dict[str, torch.Tensor] = {}
        self.num_binds = 0  # whoever has captured the program asks whether its tensors are still the same
        self._static_sizes: Sizes = {}
        self._inputs = Binding(graph.inputs, graph.symbols, device)
        self._main = _Main(graph, tuple(self._statics), _Nodes(device, choose, target or target_of(device), groups))
        self._check_symbols()

    def place(self, addresses: Addresses, memory: torch.Tensor) -> None:
        """From now on, values that have one of these addresses lie there in `memory`, `addresses.num_bytes` of uint8.

        They stay as they are until the next step; the outputs are not among them. All other values, and all of them
        before this is called, lie in memory that torch gives for the step.
        """
        self._main.place(addresses, memory)
        self.num_binds += 1

    @property
    def unbound(self) -> tuple[str, ...]:
        """The params, constants and cache tensors that `bind` has not been given yet."""
        return tuple(name for name in self._statics if name not in self._tensors)

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put params, constants and cache tensors in their places: all, or some now and others later; or others anew.

        Raises RequestError (input-mismatch) for names that the graph does not have, and for other dtypes, shapes or
        devices than it states; the program is then bound as it was before.
        """
        merged = self._tensors | dict(tensors)
        given = [self._statics[name] for name in merged if name in self._statics]
        self._static_sizes = Binding(given, self._symbols, self.device).bind(merged, {})
        self._tensors = merged
        self.num_binds += 1
        for name, tensor in tensors.items():
            for template, register in self._main.places[name]:
                template[register] = tensor

    def __call__(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run one step: the graph's inputs by name in, its outputs by name out. Cache tensors are written in place.

        The outputs are inference tensors: they take no part in autograd. Raises RequestError (input-mismatch) with
        all inputs that do not fit, or with all that is not bound yet.
        """
        if len(self._tensors) != len(self._statics):
            raise RequestError("input-mismatch", f"called before these were bound: {', '.join(self.unbound)}")
        sizes = self._inputs.bind(inputs, self._static_sizes)
        with torch.inference_mode():
            frame = self._main.frame(inputs, sizes)
            self._main.instructions.run(frame)
            return self._main.outputs(frame)

    def cut(self, outputs: dict[str, torch.Tensor], **inputs: torch.Tensor) -> Iterator[HostCall]:
        """The same step in pieces: it stops in front of each call that reads the host, and leaves it to the caller.

        `outputs` are filled in the end. Meant for capture: a call may be left out, and be made whenever the pieces
        are replayed. The caller is in inference mode.
        """
        frame = self._main.frame(inputs, self._inputs.bind(inputs, self._static_sizes))
        yield from self._main.instructions.cut(frame)
        outputs |= self._main.outputs(frame)

    def warm_up(self, outputs: dict[str, torch.Tensor], **inputs: torch.Tensor) -> Iterator[HostCall]:
        """As `cut`, but of the calls of a block the first alone runs, and gives its results for all of them.

        All calls of a block run the same instructions over sizes, types and strides that are the same: after one of
        them, whatever is compiled or made when it is first used is there. What is computed is of no use.
        """
        frame = self._main.frame(inputs, self._inputs.bind(inputs, self._static_sizes))
        yield from self._main.warm_up(frame)
        outputs |= self._main.outputs(frame)

    def _check_symbols(self) -> None:
        statics = Binding(tuple(self._statics.values()), self._symbols, self.device)
        sizes = [size for value in (*self.inputs, *self._statics.values()) for size in value.type.shape]
        used = set().union(*(exprs.free_symbols(size) for size in (*sizes, *self._main.expressions)))
        missing = sorted(used - statics.symbols - self._inputs.symbols)
        if missing:
            raise BundleError(
                "symbol-unbound",
                f"no shape of an input, param, constant or cache tensor gives a value to {', '.join(missing)}",
                where="graph symbols",
            )


class _Layout:
    """The registers of one function: which name lives where."""

    def __init__(self, names: Iterable[str]) -> None:
        self.size = 0
        self.integers: dict[ir.Dim | ir.Items, int] = {}
        self.results: dict[tuple[str, str], _Result] = {}
        self._registers: dict[str, int] = {}
        for name in names:
            self.define(name)

    def __getitem__(self, name: str) -> int:
        return self._registers[name]

    def reserve(self) -> int:
        """A register without a name."""
        self.size += 1
        return self.size - 1

    def define(self, name: str) -> int:
        """A register for a new name."""
        self._registers[name] = register = self.reserve()
        return register

    def integer(self, arg: ir.Dim | ir.Items) -> int:
        """The register of an integer, or list of integers, that is computed once a run; one for equal arguments."""
        if arg not in self.integers:
            self.integers[arg] = self.reserve()
        return self.integers[arg]

    def result(self, value: ir.Value, function: str = "") -> int:
        """The register of where a value of `main` or of a block is written: a tensor, or the sizes of a new one."""
        found = self.results.setdefault((function, value.name), _Result(self.size, value.type))
        self.size = max(self.size, found.register + 1)
        return found.register


class _Result(NamedTuple):
    """Where a value is written: the register that says it, and what is written there."""

    register: int
    type: ir.TensorType


class _Block:
    """A block, compiled once: its instructions, and where its arguments, integers and outputs live."""

    def __init__(self, block: ir.Block, nodes: _Nodes) -> None:
        self.name = block.name
        names = [value.name for value in (*block.inputs, *block.params, *block.caches)]
        layout = _Layout(names)
        types, params = types_in(block), statics_in(block)
        actions = [action for node in block.nodes for action in nodes.actions(node, types, params, layout)]
        self.arguments = {name: layout[name] for name in names}
        self.integers = layout.integers
        self.outputs = tuple(layout[name] for name in block.outputs)
        self.results = {name: result for (_, name), result in layout.results.items()}
        self.returned = spans_of(block, {block.name: frozenset(self.results)}).returned
        self.size = layout.size
        # Params and caches are held elsewhere anyway; inputs die after their last use, like any value.
        held = range(len(block.inputs), len(names))
        self.instructions = Instructions(actions, {*held, *layout.integers.values(), *self.outputs})


class _Main:
    """`main` with the blocks that it calls. `places` says in which frames, and where, each static tensor stands."""

    def __init__(self, graph: ir.Graph, statics: tuple[str, ...], nodes: _Nodes) -> None:
        layout = _Layout((*statics, *(value.name for value in graph.inputs)))
        self.places: dict[str, list[tuple[Frame, int]]] = {name: [] for name in statics}
        blocks = {block.name: _Block(block, nodes) for block in graph.blocks}
        actions: list[Action] = []
        self._calls: dict[int, tuple[str, Registers]] = {}  # by position: the block that is called, and its results
        types, static = types_in(graph), statics_in(graph)
        for item in graph.main:
            if isinstance(item, ir.Call):
                action = self._call_action(item, blocks[item.block], layout)
                self._calls[len(actions)] = item.block, action.writes
                actions.append(action)
            else:
                actions += nodes.actions(item, types, static, layout)
        self._inputs = tuple((value.name, layout[value.name]) for value in graph.inputs)
        self._outputs = tuple((name, layout[value]) for name, value in graph.outputs.items())
        self._integers = tuple((register, _evaluator(arg)) for arg, register in layout.integers.items())
        shapes = [_shape(result.type) for result in layout.results.values()]
        self._results = [
            (result.register, function, name, _evaluator(shape), dtypes.BY_NAME[result.type.dtype])
            for ((function, name), result), shape in zip(layout.results.items(), shapes, strict=True)
        ]
        self.expressions = [expr for arg in (*layout.integers, *shapes) for expr in _expressions(arg)]  # of all runs
        self._activations: tuple[Addresses, torch.Tensor] | None = None
        self._of_sizes: tuple[Sizes, list[tuple[int, Any]]] | None = None  # what the last run computed from its sizes
        outputs = (register for _, register in self._outputs)
        self.instructions = Instructions(actions, {*range(len(statics)), *layout.integers.values(), *outputs})
        self._template: Frame = [None] * layout.size
        for name in statics:
            self.places[name].append((self._template, layout[name]))

    def frame(self, inputs: Mapping[str, torch.Tensor], sizes: Sizes) -> Frame:
        """The frame with which a run begins."""
        frame = self._template.copy()
        for name, register in self._inputs:
            frame[register] = inputs[name]
        if self._of_sizes is None or self._of_sizes[0] != sizes:
            self._of_sizes = sizes, [*self._evaluated(sizes)]
        for register, value in self._of_sizes[1]:
            frame[register] = value
        return frame

    def warm_up(self, frame: Frame) -> Iterator[HostCall]:
        """See `Program.warm_up`."""
        results: dict[str, list[Any]] = {}
        for position in range(len(self.instructions)):
            block, registers = self._calls.get(position, ("", ()))
            if block not in results:
                yield from self.instructions.cut_at(position, frame)
                made = [frame[register] for register in registers]
                if block and all(value is not None for value in made):  # else one of them isn't read after this call
                    results[block] = made
            else:
                for register, value in zip(registers, results[block], strict=True):
                    frame[register] = value

    def place(self, addresses: Addresses, memory: torch.Tensor) -> None:
        """See `Program.place`."""
        self._activations = addresses, memory
        self._of_sizes = None

    def _evaluated(self, sizes: Sizes) -> Iterator[tuple[int, Any]]:
        """What depends on the sizes alone, by register: integers, and where results are written."""
        for register, value in self._integers:
            yield register, value(sizes)
        if self._activations is not None:
            for symbol, most in self._activations[0].sizes.items():
                found = sizes.get(symbol, 0)
                assert found <= most, f"{symbol} is {found}, and addresses hold up to {most}"
        for register, function, name, shape, dtype in self._results:
            yield register, self._written(function, name, shape(sizes), dtype)

    def _written(self, function: str, name: str, shape: Any, dtype: torch.dtype) -> torch.Tensor | tuple[int, ...]:
        """The tensor that the value is written into, or the sizes of a new one where it has no address."""
        if self._activations is None:
            return tuple(shape)
        addresses, memory = self._activations
        address = (addresses.blocks[function] if function else addresses.main).get(name)
        if address is None:
            return tuple(shape)
        return memory[address : address + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def outputs(self, frame: Frame) -> dict[str, torch.Tensor]:
        """What a run has left in its frame."""
        return {name: frame[register] for name, register in self._outputs}

    def _call_action(self, call: ir.Call, block: _Block, layout: _Layout) -> Action:
        """Static arguments go into the call's template; the others are moved into its frame when it runs."""
        template: Frame = [None] * block.size
        moves = [(register, layout.integer(arg)) for arg, register in block.integers.items()]
        for name, (register, kind) in block.results.items():
            returned = block.returned.get(name)
            if returned is None:  # all calls share it: only one runs at a time
                moves.append((register, layout.result(ir.Value(name, kind), block.name)))
            else:
                moves.append((register, layout.result(ir.Value(call.outputs[returned].name, kind))))
        for name, register in block.arguments.items():
            bound = call.args[name]
            if bound in self.places:
                self.places[bound].append((template, register))
            else:
                moves.append((register, layout[bound]))
        outputs = tuple(layout.define(value.name) for value in call.outputs)
        label = f"the call of block {call.block} that makes {_names(call.outputs)}"
        returns = tuple(zip(block.outputs, outputs, strict=True))
        return instructions.call_action(label, block.instructions, template, tuple(moves), returns)


class _Nodes:
    """Makes actions of nodes: chooses what computes each, and says where it runs."""

    def __init__(self, device: torch.device, choose: Choose, target: Target, groups: Groups) -> None:
        self._device = device
        self._target = target
        self._choose = choose
        self._groups = groups

    def actions(
        self, node: ir.Node, types: Mapping[str, ir.TensorType], statics: frozenset[str], layout: _Layout
    ) -> list[Action]:
        """The node as an action; before it, one for each argument that is a list of tensors."""
        actions: list[Action] = []
        constants: dict[str, Any] = {}
        reads: list[tuple[str, int]] = []
        for name, arg in node.args.items():
            if isinstance(arg, ir.Ref):
                reads.append((name, layout[arg.name]))
            elif isinstance(arg, ir.Items) and any(isinstance(item, ir.Ref) for item in arg.items):
                tensors = tuple(layout[item.name] for item in arg.items if isinstance(item, ir.Ref))
                reads.append((name, layout.reserve()))
                actions.append(instructions.list_action(f"{node.op}, argument {name}", tensors, reads[-1][1]))
            elif isinstance(arg, (ir.Dim, ir.Items)) and not all(isinstance(expr, int) for expr in _expressions(arg)):
                reads.append((name, layout.integer(arg)))
            else:
                constants[name] = _constant(arg)
        constants |= self._connected(node)
        chosen = self._choose(use_of(node, types, self._target, statics))
        is_placed = any(not each.allocates for each in chosen)
        fills = is_placed or any(each.reads_host for each in chosen)
        out = self._out(node, layout, is_placed=is_placed) if fills else ()
        writes = tuple(layout.define(value.name) for value in node.outputs)
        label = f"{node.op} that makes {_names(node.outputs)}"
        made = [
            instructions.op_action(
                label,
                each.function,
                constants,
                (*reads, *_sizes(each, layout)),
                writes,
                out,
                allocates=each.allocates,
                reads_host=each.reads_host,
            )
            for each in chosen
        ]
        if len(made) == 1:
            return [*actions, made[0]]
        ranges = [
            [(layout.integer(ir.Dim(symbol)), low, high) for symbol, (low, high) in each.sizes.items()]
            for each in chosen
        ]
        return [*actions, instructions.case_action(label, ranges, made)]

    def _connected(self, node: ir.Node) -> dict[str, Group]:
        """The groups that a node names, by argument."""
        definition = ops.lookup(node.op, node.version)
        found = {}
        for arg in definition.args if definition is not None else ():
            name = node.args.get(arg.name)
            if arg.kind == "Group" and isinstance(name, ir.Const):
                if name.value not in self._groups:
                    raise TargetError(
                        "group-missing",
                        f"{node.op} makes {_names(node.outputs)} of what all ranks of the group {name.value!r} have, "
                        f"and this rank is connected with {', '.join(map(repr, self._groups)) or 'no others'}",
                        fix="load the bundle with as many ranks as the graph is bound to",
                    )
                found[arg.name] = self._groups[str(name.value)]
        return found

    def _out(self, node: ir.Node, layout: _Layout, *, is_placed: bool) -> tuple[Out, ...]:
        """How the tensors are found or made that the node's results are written into."""
        found = []
        for value in node.outputs:
            register = layout.result(value) if is_placed else layout.integer(_shape(value.type))
            found.append((register, partial(_empty, dtypes.BY_NAME[value.type.dtype], self._device)))
        return tuple(found)


def _empty(dtype: torch.dtype, device: torch.device, shape: tuple[int, ...] | torch.Tensor) -> torch.Tensor:
    """A new tensor of this shape; or the one that stands in its place."""
    return shape if isinstance(shape, torch.Tensor) else torch.empty(shape, dtype=dtype, device=device)


def _shape(kind: ir.TensorType) -> ir.Items:
    return ir.Items(tuple(ir.Const(size) if isinstance(size, int) else ir.Dim(size) for size in kind.shape))


def _sizes(implementation: Implementation, layout: _Layout) -> list[tuple[str, int]]:
    """The argument `sizes` of launches, and the register of its value."""
    if not implementation.expressions:
        return []
    return [("sizes", layout.integer(ir.Items(tuple(map(ir.Dim, implementation.expressions)))))]


def _expressions(arg: ir.Dim | ir.Items) -> tuple[ir.Expr, ...]:
    """The integers that the argument is made of."""
    items = (arg,) if isinstance(arg, ir.Dim) else arg.items
    return tuple(exprs.normal(item.expr) if isinstance(item, ir.Dim) else _literal(item) for item in items)


def _literal(item: ir.Ref | ir.Const) -> int:
    assert isinstance(item, ir.Const), "lists of tensors are made by an instruction"
    assert isinstance(item.value, int), "verified: a list holds tensors or integers"
    return item.value


def _evaluator(arg: ir.Dim | ir.Items) -> Callable[[Sizes], int | tuple[int, ...]]:
    values = _expressions(arg)
    if isinstance(arg, ir.Dim):
        return lambda sizes: exprs.evaluate(values[0], sizes)
    return lambda sizes: tuple([exprs.evaluate(value, sizes) for value in values])


def _constant(arg: ir.Arg) -> Any:
    """The value of an argument without names and symbols."""
    if isinstance(arg, ir.Const):
        return arg.value
    if isinstance(arg, ir.DtypeArg):
        return dtypes.BY_NAME[arg.dtype]
    if isinstance(arg, ir.Steps):
        return arg
    assert isinstance(arg, (ir.Dim, ir.Items)), "a name is read from its register"
    return _evaluator(arg)({})


def _names(values: Iterable[ir.Value]) -> str:
    return ", ".join(value.name for value in values) or "nothing"
