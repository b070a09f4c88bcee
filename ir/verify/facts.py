"""What the rules read: a graph's scopes, names and expressions, gathered once; and what a rule is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Literal, NamedTuple

from precast.ir.graph import symbols
from precast.ir.graph.infer import flat
from precast.ir.graph.schema import Block, CacheGroup, Call, Dim, Expr, Graph, Node, Slot, TensorType, Value
from precast.ir.manifest import ModelInfo
from precast.ir.memory import caches
from precast.ir.weights import recipes

Kind = Literal["input", "param", "cache"]
"""What a name is given as; a constant is given as a param is."""
Fault = tuple[str, str]
"""Where, and what was expected and found there."""


class Rule(NamedTuple):
    """One rule of the language: a stable id, what it says, and the function that yields what breaks it."""

    id: str
    title: str
    check: Callable[[Facts], Iterator[Fault]]


class Scope(NamedTuple):
    """`main` or a block: what it is given, and as what; its steps in order; the names that it returns.

    `name` is the block's, empty for `main`; `types` has the type of every name. Of names that are given twice, `kinds`
    and `types` know the first.
    """

    name: str
    where: str
    given: tuple[Value, ...]
    kinds: dict[str, Kind]
    steps: tuple[Node | Call, ...]
    returned: tuple[str, ...]
    types: dict[str, TensorType]

    def at(self, index: int) -> str:
        """Where a step is, for a message: `block layer[3] aten.add.Tensor`."""
        step = self.steps[index]
        return f"{self.where}[{index}] {step.op if isinstance(step, Node) else f'call {step.block}'}"


class Facts:
    """A graph, with lookups by name; of names that are given twice, the first. `model`: whose it is, if known."""

    def __init__(self, graph: Graph, model: ModelInfo | None = None) -> None:
        self.graph = graph
        self.model = model
        self.slots: dict[str, tuple[CacheGroup, Slot]] = {
            value.name: (group, slot) for group, slot in caches.slots(graph.caches) for value in slot.tensors
        }
        scopes = list(map(_block_scope, graph.blocks))
        self.blocks = {block.name: scope for block, scope in reversed([*zip(graph.blocks, scopes, strict=True)])}
        self.main = _main_scope(graph)
        self.scopes = [*scopes, self.main]
        self.nodes = [
            (scope, scope.at(index), step)
            for scope in self.scopes
            for index, step in enumerate(scope.steps)
            if isinstance(step, Node)
        ]
        self.calls = [(self.main.at(index), step) for index, step in enumerate(graph.main) if isinstance(step, Call)]

    @cached_property
    def bound(self) -> dict[str, dict[str, set[str]]]:
        """By block and by the name of what it takes: the names of `main` that the block's calls bind to it."""
        found: dict[str, dict[str, set[str]]] = {name: {} for name in self.blocks}
        for _, call in self.calls:
            for formal, actual in call.args.items():
                found.get(call.block, {}).setdefault(formal, set()).add(actual)
        return found

    @cached_property
    def types(self) -> dict[TensorType, str]:
        """Every type of the graph, and where it is first used."""
        found: dict[TensorType, str] = {}
        for scope in self.scopes:
            for value in scope.given:
                found.setdefault(value.type, f"{scope.where} %{value.name}")
            for index, step in enumerate(scope.steps):
                for value in step.outputs:
                    found.setdefault(value.type, scope.at(index))
        return found

    @cached_property
    def expressions(self) -> dict[Expr, str]:
        """Every expression of the graph that is not a constant, and where it is first used."""
        found: dict[Expr, str] = {}
        for where, expr in self._expressions():
            if not isinstance(expr, int):
                found.setdefault(expr, where)
        return found

    def _expressions(self) -> Iterator[tuple[str, Expr]]:
        for tensor, where in self.types.items():
            yield from ((where, size) for size in tensor.shape)
        for _, where, node in self.nodes:
            yield from ((where, arg.expr) for _, arg in flat(node.args) if isinstance(arg, Dim))
        for param in self.graph.params:
            yield from ((f"param %{param.name}", expr) for expr in recipes.sizes(param.recipe))
        for group in caches.groups(self.graph.caches):
            yield from ((f"group {group.name}", size) for _, size in caches.spec_sizes(group))


def same_type(a: TensorType, b: TensorType) -> bool:
    """Whether two types are equal, their sizes as expressions."""
    return a == b or (
        a.dtype == b.dtype
        and len(a.shape) == len(b.shape)
        and all(symbols.equal(x, y) for x, y in zip(a.shape, b.shape, strict=True))
    )


def _block_scope(block: Block) -> Scope:
    given: dict[Kind, tuple[Value, ...]] = {"input": block.inputs, "param": block.params, "cache": block.caches}
    return _scope(block.name, f"block {block.name}", given, block.nodes, block.outputs)


def _main_scope(graph: Graph) -> Scope:
    params = tuple(Value(param.name, param.type) for param in graph.params)
    cached = tuple(caches.tensors(graph.caches))
    given: dict[Kind, tuple[Value, ...]] = {"input": graph.inputs, "param": params + graph.constants, "cache": cached}
    return _scope("", "main", given, graph.main, tuple(graph.outputs.values()))


def _scope(
    name: str,
    where: str,
    given: Mapping[Kind, tuple[Value, ...]],
    steps: tuple[Node | Call, ...],
    returned: tuple[str, ...],
) -> Scope:
    kinds: dict[str, Kind] = {}
    types: dict[str, TensorType] = {}
    for kind, values in given.items():
        for value in values:
            kinds.setdefault(value.name, kind)
    everything = tuple(value for values in given.values() for value in values)
    for value in (*everything, *(value for step in steps for value in step.outputs)):
        types.setdefault(value.name, value.type)
    return Scope(name, where, everything, kinds, steps, returned, types)


def duplicates(kind: str, names: Iterable[str], message: str = "is declared twice") -> Iterator[Fault]:
    """A fault for each name that occurs more than once."""
    counts = Counter(names)
    yield from ((f"{kind} {name}", message) for name, count in counts.items() if count > 1)
