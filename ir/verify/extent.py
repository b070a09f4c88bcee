"""How much a graph is, counted before anything is computed from it: what it holds, and what that expands to.

Each count bounds work and memory of all that is done with a graph later: the rules, the views, and the plan of a load.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from precast.ir import limits
from precast.ir.errors import BundleError
from precast.ir.graph.infer import flat
from precast.ir.graph.schema import (
    Apply,
    Arg,
    Call,
    Dim,
    Each,
    Expr,
    Graph,
    Items,
    Node,
    Quantise,
    Read,
    Recipe,
    Scale,
    Steps,
    Value,
)
from precast.ir.memory import caches
from precast.ir.weights import recipes


def check(graph: Graph) -> None:
    """Raise BundleError (`limit-exceeded`) for a graph of which anything is more than `precast.ir.limits` allows."""
    for what, found, limit in counts(graph):
        if found > limit:
            raise BundleError("limit-exceeded", f"graph: {found} {what}; at most {limit} are allowed")


def counts(graph: Graph) -> Iterator[tuple[str, int, int]]:
    """(what, how many, at most), the cheap ones first: later ones take for granted that those before hold."""
    yield "symbols", len(graph.symbols), limits.MAX_SYMBOLS
    yield "params", len(graph.params), limits.MAX_PARAMS
    yield "nodes and calls", sum(map(_written_steps, _steps(graph))), limits.MAX_STEPS
    calls = Counter(step.block for step in graph.main if isinstance(step, Call))
    run = [(1, step) for step in graph.main] + [
        (calls[block.name], node) for block in graph.blocks for node in block.nodes
    ]
    nodes = sum(times * _written_steps(step) for times, step in run if isinstance(step, Node))
    yield "nodes over all calls", nodes, limits.MAX_RUN_NODES
    yield (
        "arguments over all calls",
        sum(times * _arguments(step.args) for times, step in run),
        limits.MAX_RUN_ARGUMENTS,
    )
    reads = sum(_reads(param.recipe) for param in graph.params)
    yield "tensors that recipes read", reads, limits.MAX_READS
    yield "reads of tensors that were read before", reads - _different_reads(graph), limits.MAX_REPEATED_READS
    shapes = [value.type.shape for value in _values(graph)] + [param.type.shape for param in graph.params]
    yield "dimensions of one tensor", max(map(len, shapes), default=0), 4 * limits.MAX_RANK
    numbers = [size for shape in shapes for size in shape if isinstance(size, int)]
    yield "elements along one dimension", max(numbers, default=0), limits.MAX_SIZE
    yield "negative sizes", sum(size < 0 for size in numbers), limits.MAX_LISTED
    # By their encodings, because hashes of strings are not to be foreseen, and those of structs and numbers are.
    different = {msgspec.msgpack.encode(expr): expr for expr in _expressions(graph) if isinstance(expr, Apply)}
    sizes = list(map(_nodes_of, different.values()))
    yield "operations and names in one expression", max(sizes, default=0), limits.MAX_EXPRESSION_NODES
    yield "operations and names in all different expressions", sum(sizes), limits.MAX_EXPRESSIONS


def _written_steps(step: Node | Call) -> int:
    """One, and one for each step of a fused op."""
    bodies = step.args.values() if isinstance(step, Node) else ()
    return 1 + sum(len(arg.steps) for arg in bodies if isinstance(arg, Steps))


def _arguments(args: Mapping[str, Arg | str]) -> int:
    """Those of lists and of fused ops' steps one by one."""
    return sum(map(_each, args.values()))


def _each(arg: Arg | str) -> int:
    if isinstance(arg, Steps):
        return sum(_arguments(step.args) for step in arg.steps)
    return len(arg.items) if isinstance(arg, Items) else 1


def _reads(recipe: Recipe) -> int:
    if isinstance(recipe, Read):
        return 1
    if isinstance(recipe, Scale):
        return len(recipe.tensors)
    inside = sum(map(_reads, recipes.parts(recipe)))
    return inside * max(recipe.count, 1) if isinstance(recipe, Each) else inside


def _different_reads(graph: Graph) -> int:
    """How many tensors recipes read, by their names as they are written: none is made."""
    plain: set[str] = set()
    numbered: dict[str, list[tuple[int, int]]] = {}
    for name, each in (read for param in graph.params for read in _written(param.recipe, None)):
        if each is None or "*" not in name:
            plain.add(name)
        else:
            numbered.setdefault(name, []).append((each.start, each.start + max(each.count, 1)))
    return len(plain) + sum(map(_covered, numbered.values()))


def _written(recipe: Recipe, each: Each | None) -> Iterator[tuple[str, Each | None]]:
    """The names that the recipe reads, as they are written, with the `each` that they stand in."""
    if isinstance(recipe, Read):
        yield recipe.tensor, each
    elif isinstance(recipe, Scale):
        yield from ((name, None) for name in recipe.tensors)
    if isinstance(recipe, Quantise) and recipe.part == "scales":
        # A matrix is read for its values and for its scales.
        yield from ((f"scales of {name}", each) for name, each in _written(recipe.of, each))
        return
    for part in recipes.parts(recipe):
        yield from _written(part, recipe if isinstance(recipe, Each) else each)


def _covered(spans: list[tuple[int, int]]) -> int:
    """How many integers lie in one of these, from the first up to the second."""
    covered, reached = 0, min(spans)[0]
    for start, end in sorted(spans):
        covered += max(0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def _nodes_of(expr: Expr) -> int:
    return 1 + sum(map(_nodes_of, expr.args)) if isinstance(expr, Apply) else 1


def _expressions(graph: Graph) -> Iterator[Expr]:
    for value in _values(graph):
        yield from value.type.shape
    for step in _steps(graph):
        if isinstance(step, Node):
            yield from (item.expr for _, item in flat(step.args) if isinstance(item, Dim))
    for param in graph.params:
        yield from param.type.shape
        yield from recipes.sizes(param.recipe)
    for group in caches.groups(graph.caches):
        yield from (size for _, size in caches.spec_sizes(group))


def _values(graph: Graph) -> Iterator[Value]:
    yield from (*graph.inputs, *graph.constants, *caches.tensors(graph.caches))
    for block in graph.blocks:
        yield from (*block.inputs, *block.params, *block.caches)
    for step in _steps(graph):
        yield from step.outputs


def _steps(graph: Graph) -> Iterable[Node | Call]:
    yield from graph.main
    for block in graph.blocks:
        yield from block.nodes
