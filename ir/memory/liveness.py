"""What is alive in a graph while it runs: op by op the memory that values hold, without running it.

The graph is walked as the loader runs it (`precast.loader.program.restore`): a value lives until its last use, a
block's inputs are held by the block alone from its call on, a view keeps the memory that it looks into. Inputs, params,
constants and caches are no activations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from precast.ir import limits
from precast.ir.errors import BundleError
from precast.ir.graph import symbols
from precast.ir.graph.infer import named_references, references
from precast.ir.graph.schema import Arg, Call, Const, Dim, Expr, Graph, Node, TensorType, Value
from precast.ir.memory import caches, strides
from precast.ir.memory.addresses import Addresses
from precast.ir.memory.strides import Layout
from precast.ir.memory.views import view_of
from precast.ir.weights.tensorfile import element_bytes

ROUNDING = 512
"""torch's CUDA allocator gives multiples of so many bytes."""

_GENERIC = (1009, 757, 1213, 881, 1103, 613, 929, 1151)


class Operand(NamedTuple):
    """A tensor that a node takes: its type, whether its elements lie in row-major order without gaps, and whether it is
    an activation, and not an input, a param, a constant or a cache."""

    type: TensorType
    is_contiguous: bool
    is_activation: bool = True


Workspace = Callable[[Node, Mapping[str, Operand]], Expr]
"""Bytes that a node holds beside its results at most, by its tensors, without those in lists."""


class Moment(NamedTuple):
    """One op as it runs: in bytes what is alive, what the op makes, and its workspace.

    `held` are sizes, each with how often it occurs. `path` is the call of the op's block, empty in `main`.
    """

    path: str
    node: Node
    held: frozenset[tuple[Expr, int]]
    made: frozenset[tuple[Expr, int]]
    workspace: Expr


class Run(NamedTuple):
    """The ops in the order in which they run, and what the outputs keep, as sizes with how often each occurs."""

    moments: list[Moment]
    kept: frozenset[tuple[Expr, int]]


class _Storage:
    """Memory that one op made; views of it share it."""

    __slots__ = ("size",)

    def __init__(self, size: Expr) -> None:
        self.size = size


class _Held(NamedTuple):
    """A value: its type, where its elements lie, in which memory; None: in memory that is no activation."""

    type: TensorType
    layout: Layout
    storage: _Storage | None


_Workspaces = dict[tuple[int, tuple[tuple[bool, bool], ...]], Expr]
"""By a node's identity, and for each of its arguments whether it lies in row-major order and is an activation."""


def runs(graph: Graph, workspace: Workspace, addresses: Addresses | None = None) -> list[Run]:
    """Two runs of a verified graph that is bound to its world, with what each of its nodes holds beside its results.

    One for sizes without common factors, one for the smallest: with a dimension of 1, copies can become views. Values
    that have one of the `addresses` take no bytes: their memory is there for the whole run.
    """
    workspaces: _Workspaces = {}
    return [_Walk(graph, workspace, sizes, workspaces, addresses).run() for sizes in _sample_sizes(graph)]


@contextmanager
def computed() -> Iterator[None]:
    """Turns what arithmetic over a graph's sizes raises in the body into BundleError (`graph-invalid`)."""
    try:
        yield
    except (symbols.ExprError, ArithmeticError) as error:
        message = f"what the graph takes of memory and time can't be computed: {error}"
        raise BundleError("graph-invalid", message) from None


def allocated_bytes(kind: TensorType) -> Expr:
    """The bytes that torch's CUDA allocator takes for a tensor."""
    exact = symbols.mul(element_bytes(kind.dtype), *kind.shape)
    if all(factor % ROUNDING == 0 for factor in symbols.terms(exact).values()):
        return exact
    if isinstance(exact, int):
        return -(-exact // ROUNDING) * ROUNDING
    return symbols.add(exact, ROUNDING)


def generic_sizes(graph: Graph) -> dict[str, int]:
    """Sizes of its symbols without common factors: what is a view for these is one for all, but for some that are 1."""
    return {
        symbol.name: _GENERIC[i % len(_GENERIC)] + 2 * len(_GENERIC) * (i // len(_GENERIC))
        for i, symbol in enumerate(graph.symbols)
    }


def _sample_sizes(graph: Graph) -> list[dict[str, int]]:
    return [generic_sizes(graph), {symbol.name: 1 for symbol in graph.symbols}]


class _Walk:
    """One walk over the program, for sizes that say which results are views."""

    def __init__(
        self,
        graph: Graph,
        workspace: Workspace,
        sizes: Mapping[str, int],
        workspaces: _Workspaces,
        addresses: Addresses | None,
    ) -> None:
        self._graph = graph
        self._addresses = addresses
        self._placed: Container[str] = () if addresses is None else addresses.main  # of the function that runs
        self._workspace_of = workspace
        self._sizes = sizes
        self._blocks = {block.name: block for block in graph.blocks}
        self._alive: Counter[_Storage] = Counter()  # by how many registers hold it
        self._sum: Counter[Expr] = Counter()  # the sizes of what is alive
        self._allocated: dict[TensorType, Expr] = {}
        self._workspaces = workspaces
        self._path = ""
        self._moments: list[Moment] = []
        self._held = 0

    def run(self) -> Run:
        """The whole program."""
        params = [Value(param.name, param.type) for param in self._graph.params]
        given = (*self._graph.inputs, *params, *self._graph.constants, *caches.tensors(self._graph.caches))
        frame = {value.name: self._outside(value) for value in given}
        self._steps(self._graph.main, frame, kept={*frame, *self._graph.outputs.values()})
        return Run(self._moments, frozenset(self._sum.items()))

    def _steps(self, steps: Sequence[Node | Call], frame: dict[str, _Held], kept: set[str]) -> None:
        for step, dead in zip(steps, _deaths(steps, kept), strict=True):
            if isinstance(step, Call):
                self._call(step, frame, dead)
                continue
            made = self._node(step, frame)
            for value, held in zip(step.outputs, made, strict=True):
                self._hold(held)
                frame[value.name] = held
            self._release(frame, dead)

    def _call(self, call: Call, frame: dict[str, _Held], dead: Sequence[str]) -> None:
        block = self._blocks[call.block]
        local = {name: frame[bound] for name, bound in call.args.items()}
        for held in local.values():
            self._hold(held)
        outputs = {value.name for value in call.outputs}
        self._release(frame, [name for name in dead if name not in outputs])
        self._path = f"{call.block} that makes {', '.join(value.name for value in call.outputs)}"
        outside, self._placed = self._placed, self._placed_in(call)
        self._steps(block.nodes, local, {*(value.name for value in (*block.params, *block.caches)), *block.outputs})
        self._path, self._placed = "", outside
        unused = set(dead)
        for value, name in zip(call.outputs, block.outputs, strict=True):
            if value.name not in unused:
                frame[value.name] = local[name]
                self._hold(local[name])
        self._release(local, list(local))

    def _placed_in(self, call: Call) -> Container[str]:
        """The values of the call's block that have an address."""
        if self._addresses is None:
            return ()
        returned = self._addresses.returned[call.block].items()
        given = {name for name, index in returned if call.outputs[index].name in self._addresses.main}
        return given | self._addresses.blocks[call.block].keys()

    def _node(self, node: Node, frame: Mapping[str, _Held]) -> list[_Held]:
        """The results; their making is a moment."""
        made = [self._result(node, value, frame) for value in node.outputs]
        new = Counter(held.storage.size for held in made if held.storage and held.storage not in self._alive)
        self._held += len(self._sum)
        if self._held > limits.MAX_HELD:
            message = f"graph: values of more than {limits.MAX_HELD} different sizes are alive, over all nodes"
            raise BundleError("limit-exceeded", message)
        alive, own = frozenset(self._sum.items()), frozenset(new.items())
        self._moments.append(Moment(self._path, node, alive, own, self._workspace(node, frame)))
        return made

    def _workspace(self, node: Node, frame: Mapping[str, _Held]) -> Expr:
        """Of a block's node, the same in all its calls if its arguments lie alike."""
        held = {name: frame[value] for name, value in named_references(node.args)}
        facts = [(each.layout.is_contiguous, each.storage is not None) for each in held.values()]
        key = (id(node), tuple(facts))
        if key not in self._workspaces:
            operands = {name: Operand(each.type, *of) for (name, each), of in zip(held.items(), facts, strict=True)}
            self._workspaces[key] = self._workspace_of(node, operands)
        return self._workspaces[key]

    def _result(self, node: Node, value: Value, frame: Mapping[str, _Held]) -> _Held:
        shape = self._numbers(value.type.shape)
        if value.name in self._placed:
            return _Held(value.type, strides.contiguous(shape), _Storage(0))
        names = list(references(node.args))
        source = frame[names[0]] if names else None
        if source is not None:
            if node.op == "aten.to.dtype" and source.type.dtype == value.type.dtype:
                return source
            view = view_of(node, source.layout, shape, self._number)
            if view is not None:
                return _Held(value.type, view.layout, source.storage)
        layout = strides.made_by(node.op, shape, (of for name in names if (of := frame[name].layout).shape == shape))
        if value.type not in self._allocated:
            self._allocated[value.type] = allocated_bytes(value.type)
        return _Held(value.type, layout, _Storage(self._allocated[value.type]))

    def _number(self, arg: Arg) -> int:
        if isinstance(arg, Dim):
            return symbols.evaluate(arg.expr, self._sizes)
        assert isinstance(arg, Const), "verified: an integer"
        assert isinstance(arg.value, int), "verified: an integer"
        return arg.value

    def _numbers(self, shape: Sequence[Expr]) -> tuple[int, ...]:
        return tuple(size if isinstance(size, int) else symbols.evaluate(size, self._sizes) for size in shape)

    def _outside(self, value: Value) -> _Held:
        return _Held(value.type, strides.contiguous(self._numbers(value.type.shape)), None)

    def _hold(self, held: _Held) -> None:
        if held.storage is not None:
            if not self._alive[held.storage]:
                self._sum[held.storage.size] += 1
            self._alive[held.storage] += 1

    def _release(self, frame: dict[str, _Held], names: Iterable[str]) -> None:
        for name in names:
            storage = frame.pop(name).storage
            if storage is None:
                continue
            self._alive[storage] -= 1
            if not self._alive[storage]:
                del self._alive[storage]
                self._sum[storage.size] -= 1
                if not self._sum[storage.size]:
                    del self._sum[storage.size]


def _deaths(steps: Sequence[Node | Call], kept: set[str]) -> list[list[str]]:
    """For each step, the names that nobody touches after it."""
    seen = set(kept)
    found: list[list[str]] = []
    for step in reversed(steps):
        reads = dict.fromkeys(step.args.values() if isinstance(step, Call) else references(step.args))
        touched = dict.fromkeys([*reads, *(value.name for value in step.outputs)])
        found.append([name for name in touched if name not in seen])
        seen.update(name for name in touched if name in reads)
    return found[::-1]
