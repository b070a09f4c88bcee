"""What a step of a graph cannot do without: bytes that it moves, and floating-point operations.

Of the weights each is read once: of an embedding a row for each token, of a layer of experts those that are chosen.
Keys, values and latents that the step sees are read, states are read and written. Activations are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from precast.ir.graph import symbols
from precast.ir.graph.schema import Block, Call, Graph, Items, Node, Ref, StateGroup
from precast.ir.memory import caches
from precast.ir.ops.flops import node_work
from precast.ir.weights.tensorfile import element_bytes
from precast.kernels.use import types_in

_VIEWS = frozenset(
    f"aten.{name}" for name in ("reshape.default", "slice.Tensor", "transpose.int", "unsqueeze.default", "view.default")
)
_WORLD = {"tp": 1, "rank": 0, "ep": 1}
_EMBEDDINGS = (
    "precast.embedding", "precast.sharded_embedding", "precast.quantised_embedding",
    "precast.quantised_sharded_embedding",
)  # fmt: skip
EXPERTS = ("precast.experts", "precast.quantised_experts")


class Floor(NamedTuple):
    """Bytes of weights and of caches, and floating-point operations."""

    weight_bytes: int
    cache_bytes: int
    flops: float

    def milliseconds(self, read: float, product: float) -> float:
        """At `read` bytes and `product` operations a second: the larger of both times."""
        return 1000 * max((self.weight_bytes + self.cache_bytes) / read, self.flops / product)


def floor(graph: Graph, *, tokens: int, sequences: int, length: int, experts: Sequence[int]) -> Floor:
    """Of a step of so many tokens of so many sequences, each of `length` tokens after it, and one row of logits each.

    `experts`: how many each layer of experts uses, in the order in which these run.
    """
    held = (
        2 * caches.state_bytes(group) if isinstance(group, StateGroup) else caches.visible_bytes(group, length)
        for group in caches.groups(graph.caches)
    )
    sizes = {symbol.name: max(symbol.min, 1) for symbol in graph.symbols}
    sizes |= {"T": tokens, "B": sequences, "R": sequences}
    return Floor(_weight_bytes(graph, tokens, experts), sequences * sum(held), _flops(graph, sizes))


def bytes_of_one_token(graph: Graph, length: int) -> int:
    """What a step of one sequence moves, which has `length` tokens after it."""
    params, chosen = frozenset(param.name for param in graph.params), list[int]()
    for function, node, _ in _reads(graph, params):
        if node.op in EXPERTS:
            ids = node.args["expert_ids"]
            assert isinstance(ids, Ref)
            chosen.append(symbols.evaluate(types_in(function)[ids.name].shape[-1], _WORLD))
    found = floor(graph, tokens=1, sequences=1, length=length, experts=chosen)
    return found.weight_bytes + found.cache_bytes


def _weight_bytes(graph: Graph, tokens: int, experts: Sequence[int]) -> int:
    """Each param once, by the node that reads the largest part of it."""
    params = {param.name: param.type for param in graph.params}
    found: dict[str, int] = {}
    layers = iter(experts)
    for _, node, read in _reads(graph, frozenset(params)):
        chosen = next(layers) if node.op in EXPERTS else 0
        for name in read:
            shape = [symbols.evaluate(size, _WORLD) for size in params[name].shape]
            whole = math.prod(shape) * element_bytes(params[name].dtype)
            if node.op in _EMBEDDINGS:
                whole = min(whole, whole // shape[0] * tokens)
            if node.op in EXPERTS:
                whole = whole // shape[0] * chosen
            found[name] = max(found.get(name, 0), whole)
    return sum(found.values())


def _reads(graph: Graph, params: frozenset[str]) -> Iterator[tuple[Graph | Block, Node, list[str]]]:
    """Each node that runs, whose it is, and the params that it reads, by their names in `main`; views read nothing."""
    blocks = {block.name: block for block in graph.blocks}
    names = {name: name for name in params}
    for step in graph.main:
        if isinstance(step, Call):
            inside = {own: names[given] for own, given in step.args.items() if given in names}
            for node in blocks[step.block].nodes:
                yield from ((blocks[step.block], *read) for read in _read(node, inside))
        else:
            yield from ((graph, *read) for read in _read(step, names))


def _read(node: Node, names: dict[str, str]) -> Iterator[tuple[Node, list[str]]]:
    """The node, unless it makes a view; `names` get that of a view of a param."""
    read = [names[name] for name in _operands(node) if name in names]
    if node.op in _VIEWS and read:
        names[node.outputs[0].name] = read[0]
    else:
        yield node, read


def _operands(node: Node) -> Iterator[str]:
    for arg in node.args.values():
        items = arg.items if isinstance(arg, Items) else (arg,)
        yield from (each.name for each in items if isinstance(each, Ref))


def _flops(graph: Graph, sizes: Mapping[str, int]) -> float:
    shapes = {function.name if function is not graph else "": _shapes(function, sizes)
              for function in (graph, *graph.blocks)}  # fmt: skip
    blocks = {block.name: sum(node_work(node, shapes[block.name]) for node in block.nodes) for block in graph.blocks}
    steps = graph.main
    return sum(blocks[step.block] if isinstance(step, Call) else node_work(step, shapes[""]) for step in steps)


def _shapes(function: Graph | object, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    types = types_in(function)  # type: ignore[arg-type]
    unknown = {name: 1 for kind in types.values() for size in kind.shape for name in symbols.free_symbols(size)}
    known = unknown | dict(sizes)
    return {name: tuple(symbols.evaluate(size, known) for size in kind.shape) for name, kind in types.items()}
