"""What the rules read: a graph's scopes, names and expressions, gathered once; and what a rule is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Literal, NamedTuple

from precast.ir.graph import symbols
from precast.ir.graph.schema import (
    Block,
    Call,
    Dim,
    Expr,
    Graph,
    Group,
    Items,
    Node,
    PagedSpec,
    Recipe,
    Reshape,
    Slice,
    Slot,
    StateGroup,
    TensorType,
    Value,
)
from precast.ir.memory import caches
from precast.ir.weights import recipes

Fault = tuple[str, str]
"""Where, and what was expected and found there."""


class Rule(NamedTuple):
    """One rule of the language: a stable id, what it says, and the function that yields what breaks it."""

    id: str
    title: str
    check: Callable[[Facts], Iterator[Fault]]


class Scope(NamedTuple):
    """`main` or a block: what it is given by name, its steps in order, the names that it returns."""

    where: str
    given: tuple[Value, ...]
    caches: frozenset[str]
    steps: tuple[Node | Call, ...]
    returned: tuple[str, ...]
    types: dict[str, TensorType]

    def at(self, index: int) -> str:
        """Where a step is, for a message: `block layer[3] aten.add.Tensor`."""
        step = self.steps[index]
        return f"{self.where}[{index}] {step.op if isinstance(step, Node) else f'call {step.block}'}"


class Formal(NamedTuple):
    """A name that a block takes: as what, and of which type."""

    kind: Literal["input", "param", "cache"]
    type: TensorType


class Facts:
    """A graph, with lookups by name; of names that are given twice, the first."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.blocks: dict[str, Block] = {block.name: block for block in reversed(graph.blocks)}
        self.slots: dict[str, tuple[Group | StateGroup, Slot]] = {
            value.name: (group, slot) for group, slot in caches.slots(graph.caches) for value in slot.tensors
        }
        self.scopes = [_block_scope(block) for block in graph.blocks]
        self.block_scopes = {
            block.name: scope for block, scope in zip(reversed(graph.blocks), reversed(self.scopes), strict=True)
        }
        self.formals = {name: _formals(block) for name, block in self.blocks.items()}
        self.main = _main_scope(graph)
        self.scopes.append(self.main)
        self.calls = [(index, step) for index, step in enumerate(graph.main) if isinstance(step, Call)]

    @cached_property
    def types(self) -> dict[TensorType, str]:
        """Every type of the graph, and where it is first used."""
        found: dict[TensorType, str] = {}
        for scope in self.scopes:
            for value in scope.given:
                if value.type not in found:
                    found[value.type] = f"{scope.where} %{value.name}"
            for index, step in enumerate(scope.steps):
                for value in step.outputs:
                    if value.type not in found:
                        found[value.type] = scope.at(index)
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
        for scope in self.scopes:
            for index, step in enumerate(scope.steps):
                if isinstance(step, Node):
                    yield from ((scope.at(index), expr) for expr in _argument_expressions(step))
        for param in self.graph.params:
            yield from ((f"param %{param.name}", expr) for expr in recipe_expressions(param.recipe))
        for group in self.graph.caches.groups:
            if isinstance(group.spec, PagedSpec):
                yield f"group {group.name}", group.spec.num_kv_heads
        for states in self.graph.caches.states:
            yield from ((f"group {states.name}", size) for size in states.spec.shape)


def same_type(a: TensorType, b: TensorType) -> bool:
    """Whether two types are equal, their sizes as expressions."""
    return a == b or (
        a.dtype == b.dtype
        and len(a.shape) == len(b.shape)
        and all(symbols.equal(x, y) for x, y in zip(a.shape, b.shape, strict=True))
    )


def _block_scope(block: Block) -> Scope:
    return _scope(
        f"block {block.name}",
        (*block.inputs, *block.params, *block.caches),
        frozenset(value.name for value in block.caches),
        block.nodes,
        block.outputs,
    )


def _formals(block: Block) -> dict[str, Formal]:
    return {
        **{value.name: Formal("input", value.type) for value in block.inputs},
        **{value.name: Formal("param", value.type) for value in block.params},
        **{value.name: Formal("cache", value.type) for value in block.caches},
    }


def _main_scope(graph: Graph) -> Scope:
    cached = list(caches.tensors(graph.caches))
    params = [Value(param.name, param.type) for param in graph.params]
    return _scope(
        "main",
        (*graph.inputs, *params, *graph.constants, *cached),
        frozenset(value.name for value in cached),
        graph.main,
        tuple(graph.outputs.values()),
    )


def _scope(
    where: str,
    given: tuple[Value, ...],
    caches: frozenset[str],
    steps: tuple[Node | Call, ...],
    returned: tuple[str, ...],
) -> Scope:
    types: dict[str, TensorType] = {}
    for values in (given, *(step.outputs for step in steps)):
        for value in values:
            types.setdefault(value.name, value.type)
    return Scope(where, given, caches, steps, returned, types)


def _argument_expressions(node: Node) -> Iterator[Expr]:
    for arg in node.args.values():
        if isinstance(arg, Dim):
            yield arg.expr
        elif isinstance(arg, Items):
            yield from (item.expr for item in arg.items if isinstance(item, Dim))


def recipe_expressions(recipe: Recipe) -> Iterator[Expr]:
    """The sizes that a recipe writes out: starts, lengths, and shapes of `Reshape`."""
    if isinstance(recipe, Slice):
        yield from (recipe.start, recipe.length)
    elif isinstance(recipe, Reshape):
        yield from recipe.shape
    for part in recipes.parts(recipe):
        yield from recipe_expressions(part)


def duplicates(kind: str, names: Iterable[str], message: str = "is declared twice") -> Iterator[Fault]:
    """A fault for each name that occurs more than once."""
    counts = Counter(names)
    yield from ((f"{kind} {name}", message) for name, count in counts.items() if count > 1)
