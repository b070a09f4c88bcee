"""Which nodes of a graph compute with the tokens of all ranks, where each rank has sequences of its own (`dp`).

What ranks have parts of belongs together: nodes between which such parts go are one *piece* of the graph. A piece with
an op that looks across tokens, such as attention with its caches, is whole on every rank, and sees the rank's own
tokens. All other pieces stay split, and compute with all ranks' tokens: experts, feed-forward layers, the embedding,
the head. What is no piece, such as norms and routers, sees own tokens.

Names play no part, nor does the shard plan: the sizes of a graph that is not bound to a world say what is split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from precast.ir.graph import partial_sums, symbols
from precast.ir.graph.infer import flat, references
from precast.ir.graph.schema import Call, Dim, Graph, Node, TensorType, Value
from precast.ir.memory import caches
from precast.ir.ops import table
from precast.ir.ops.checks import WORLD

SUM = "precast.all_reduce"


class Function(NamedTuple):
    """A block, or `main` under the name "": what it is given, its steps, the names that it returns, and all types.

    `varying`: the values that depend on the step's inputs; others are the same on all ranks, or parts of such.
    """

    name: str
    caches: frozenset[str]
    steps: Sequence[Node | Call]
    returned: tuple[str, ...]
    types: dict[str, TensorType]
    varying: frozenset[str]


class AllTokens(NamedTuple):
    """Of a function: the steps that compute with all ranks' tokens, and the results that are parts of sums over ranks.

    A sum over ranks is among the steps if it adds up what such steps make.
    """

    steps: frozenset[int]
    parts: frozenset[str]


def functions(graph: Graph) -> dict[str, Function]:
    """`main` and all blocks, by name."""
    params = [Value(param.name, param.type) for param in graph.params]
    cached = list(caches.tensors(graph.caches))
    given = [*graph.inputs, *params, *graph.constants, *cached]
    main = _function("", graph.main, graph.outputs.values(), given, cached, (value.name for value in graph.inputs))
    taken: dict[str, set[str]] = {block.name: set() for block in graph.blocks}
    for step in graph.main:
        if isinstance(step, Call):
            taken[step.block].update(formal for formal, actual in step.args.items() if actual in main.varying)
    made = {"": main}
    for block in graph.blocks:
        given = [*block.inputs, *block.params, *block.caches]
        varying = (value.name for value in block.inputs if value.name in taken[block.name])
        made[block.name] = _function(block.name, block.nodes, block.outputs, given, block.caches, varying)
    return made


def _function(
    name: str, steps: Sequence[Node | Call], returned: Iterable[str], given: Sequence[Value], cached: Iterable[Value],
    varying: Iterable[str],
) -> Function:  # fmt: skip
    held = frozenset(value.name for value in cached)
    known = {*varying, *held}
    for step in steps:
        if isinstance(step, Call) or not known.isdisjoint(references(step.args)):
            known.update(value.name for value in step.outputs)
    types = {value.name: value.type for value in (*given, *(value for step in steps for value in step.outputs))}
    return Function(name, held, steps, tuple(returned), types, frozenset(known))


def all_tokens(function: Function) -> AllTokens:
    """What of the function computes with all ranks' tokens; see the module."""
    return _Pieces(function).found()


class _Pieces:
    """The pieces of one function, as they are found from its first step to its last.

    `_makers`: by each value that ranks have parts of, or that another one gets otherwise, the step that makes it.
    `_sources`: by each part of a sum, the steps that make what is summed.
    """

    def __init__(self, function: Function) -> None:
        self._function = function
        self._piece_of: dict[int, int] = {}
        self._makers: dict[str, int] = {}
        self._sources: dict[str, set[int]] = {}
        self._after: list[int] = []  # steps that take parts of sums

    def found(self) -> AllTokens:
        for index, step in enumerate(self._function.steps):
            if isinstance(step, Node):
                self._see(index, step)
        own = {self._root(index) for index in self._piece_of if self._looks_across(self._function.steps[index])}
        shared = {index for index in self._piece_of if self._root(index) not in own}
        for index in self._after:
            step = self._function.steps[index]
            assert isinstance(step, Node), "a call takes no parts of sums"
            if self._sources_of(step) <= shared:
                shared.add(index)
        return AllTokens(frozenset(shared), frozenset(self._sources))

    def _see(self, index: int, node: Node) -> None:
        takes = [self._makers[name] for name in references(node.args) if name in self._makers]
        sources = self._sources_of(node)
        if node.op == SUM:
            self._after.append(index)
            return
        makes_parts = partial_sums.makes_parts(node, self._function.types)
        if sources and not makes_parts:
            self._after.append(index)
            for name in partial_sums.kept(node, self._sources):
                self._sources[name] = sources
            return
        if not takes and not _depends(node, self._function.types):
            return
        self._piece_of[index] = index
        for other in takes:
            self._piece_of[self._root(other)] = self._root(index)
        for value in node.outputs:
            if makes_parts:
                self._sources[value.name] = {index}
            else:
                self._makers[value.name] = index

    def _sources_of(self, node: Node) -> set[int]:
        return set().union(*(self._sources.get(name, ()) for name in references(node.args)))

    def _root(self, index: int) -> int:
        while self._piece_of[index] != index:
            index = self._piece_of[index]
        return index

    def _looks_across(self, step: Node | Call) -> bool:
        if not isinstance(step, Node):
            return False
        row = table.lookup(step.op, step.version)
        assert row is not None, "the graph was verified"
        return row.tokens.kind == "sequences" or not self._function.caches.isdisjoint(references(step.args))


def _depends(node: Node, types: dict[str, TensorType]) -> bool:
    """Whether the node differs between ranks, or takes or makes what does."""
    given = (types[name] for name in references(node.args))
    kinds = (*given, *(value.type for value in node.outputs))
    return any(map(depends, kinds)) or any(
        isinstance(arg, Dim) and symbols.free_symbols(arg.expr) & WORLD for _, arg in flat(node.args)
    )


def depends(kind: TensorType) -> bool:
    """Whether a tensor's sizes depend on the world."""
    return any(not isinstance(size, int) and symbols.free_symbols(size) & WORLD for size in kind.shape)


def params_with_all_tokens(
    graph: Graph, found: dict[str, AllTokens], twice: Callable[[str], Exception]
) -> frozenset[str]:
    """The params that nodes with all ranks' tokens take. Raises `twice` of one that is split, and that others take,
    too.

    `found`: by function.
    """
    uses = dict(_uses(graph, found))
    shared, own = (frozenset(name for name, users in uses.items() if which in users) for which in (True, False))
    for param in graph.params:
        if depends(param.type) and param.name in shared & own:
            raise twice(param.name)
    return shared


def _uses(graph: Graph, found: dict[str, AllTokens]) -> Iterator[tuple[str, set[bool]]]:
    """By param, whether nodes with all ranks' tokens take it, others, or both."""
    formals: dict[tuple[str, str], set[bool]] = {}
    for block in graph.blocks:
        for index, node in enumerate(block.nodes):
            for name in references(node.args):
                formals.setdefault((block.name, name), set()).add(index in found[block.name].steps)
    uses: dict[str, set[bool]] = {param.name: set() for param in graph.params}
    for index, step in enumerate(graph.main):
        if isinstance(step, Node):
            taken = [(name, {index in found[""].steps}) for name in references(step.args)]
        else:
            taken = [(actual, formals.get((step.block, formal), set())) for formal, actual in step.args.items()]
        for name, users in taken:
            if name in uses:
                uses[name] |= users
    yield from uses.items()
