"""Plans where values lie: one address each in the memory of activations, for the largest sizes of a step.

It is arithmetic over the graph as the loader runs it. A value has its place from the node that makes it to the last use
of it or of a view of it; values that are never alive together share memory. Addresses hold for all smaller sizes, so
they are the same in every step, captured or not.

A block's values lie at the same addresses in each of its calls, as only one call runs at a time. What it returns lies
where its caller says. What the graph returns is its caller's, and has no address.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from precast.ir.graph import symbols
from precast.ir.graph.infer import references
from precast.ir.graph.schema import Block, Call, Graph, Node, TensorType, Value
from precast.ir.weights.tensorfile import element_bytes

ALIGNMENT = 256
"""Bytes to which each place is aligned, as blocks of CUDA's allocators are."""

VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "expand.default", "permute.default", "reshape.default", "select.int", "slice.Tensor", "squeeze.dim",
        "to.dtype", "transpose.int", "unsqueeze.default",
    )
)  # fmt: skip
"""Ops whose result may lie in memory of their first argument."""

Placed = Mapping[str, frozenset[str]]
"""By a block's name, empty for `main`: the values that are written where they are told. All others look into memory of
their arguments, or bring their own."""


class Addresses(NamedTuple):
    """Where values begin in the memory of activations: those of `main`, with calls' results, and those of each block.

    They hold for steps of up to these `sizes`. `returned` says of values of a block which result lies in their memory:
    its address is theirs.
    """

    sizes: Mapping[str, int]
    num_bytes: int
    main: Mapping[str, int]
    blocks: Mapping[str, Mapping[str, int]]
    returned: Mapping[str, Mapping[str, int]]


class Storage(NamedTuple):
    """Memory of one value, and the steps of its function at which it is alive: from the first to the last."""

    name: str
    type: TensorType
    first: int
    last: int


class Spans(NamedTuple):
    """The memory that values of one function have; and by result, in which of it, or in which input's, it lies."""

    storages: tuple[Storage, ...]
    results: tuple[str | None, ...]

    @property
    def local(self) -> tuple[Storage, ...]:
        """The memory that no result lies in."""
        return tuple(each for each in self.storages if each.name not in self.results)

    @property
    def returned(self) -> dict[str, int]:
        """Of the other memory, which result lies in it; the first, if several do."""
        own = {each.name for each in self.storages}
        return {name: index for index, name in reversed(list(enumerate(self.results))) if name in own}


class _Sized(NamedTuple):
    name: str
    first: int
    last: int
    num_bytes: int


def plan(graph: Graph, placed: Placed, sizes: Mapping[str, int]) -> Addresses:
    """Addresses of the `placed` values whose sizes depend on nothing but `sizes`, which are the largest of a step.

    Raises what evaluating a size raises (`precast.ir.memory.liveness.computed`).
    """
    spans = {block.name: spans_of(block, placed) for block in graph.blocks}
    frames = {name: _fitted(_sized(each.local, sizes)) for name, each in spans.items()}
    calls = [position for position, step in enumerate(graph.main) if isinstance(step, Call)]
    # All calls' own values share one place, which nothing else has between the first call and the last.
    frame_bytes = max((num_bytes for _, num_bytes in frames.values()), default=0)
    frame = [_Sized("", calls[0], calls[-1], frame_bytes)] if calls else []
    main, num_bytes = _fitted([*frame, *_sized(spans_of(graph, placed, spans).local, sizes)])
    base = main.pop("", 0)
    blocks = {name: {value: base + offset for value, offset in found.items()} for name, (found, _) in frames.items()}
    return Addresses(sizes, num_bytes, main, blocks, {name: each.returned for name, each in spans.items()})


def spans_of(function: Graph | Block, placed: Placed, blocks: Mapping[str, Spans] | None = None) -> Spans:
    """When the memory of each value is alive. `blocks`: the spans of the blocks that the function calls."""
    if isinstance(function, Graph):
        steps: Sequence[Node | Call] = function.main
        own, results = placed.get("", frozenset()), tuple(function.outputs.values())
        memory: dict[str, str | None] = {}
    else:
        steps, own, results = function.nodes, placed.get(function.name, frozenset()), function.outputs
        memory = {value.name: value.name for value in function.inputs}  # what its caller gives
    found: dict[str, Storage] = {}

    for position, step in enumerate(steps):
        for name in step.args.values() if isinstance(step, Call) else references(step.args):
            held = found.get(memory.get(name) or "")
            if held is not None:
                found[held.name] = held._replace(last=position)
        made = _made(step, own) if isinstance(step, Node) else _returned(step, (blocks or {})[step.block])
        for value, source in made:
            if source == value.name:
                found[value.name] = Storage(value.name, value.type, position, position)
                memory[value.name] = value.name
            else:
                memory[value.name] = memory.get(source or "")
    return Spans(tuple(found.values()), tuple(memory.get(name) for name in results))


def _made(node: Node, placed: frozenset[str]) -> Iterator[tuple[Value, str | None]]:
    """Each result, and the value in whose memory it lies: itself or an argument; None if it brings its own."""
    views = next(references(node.args), None) if node.op in VIEWS else None
    for value in node.outputs:
        yield value, value.name if value.name in placed else views


def _returned(call: Call, spans: Spans) -> Iterator[tuple[Value, str | None]]:
    """The same for a call. Of several results in one memory, the first has it, in the type of what is made."""
    types = {each.name: each.type for each in spans.storages}
    first: dict[str, str] = {}
    for value, source in zip(call.outputs, spans.results, strict=True):
        if source in types:
            yield Value(value.name, types[source]), first.setdefault(source, value.name)
        else:
            yield value, call.args.get(source or "")


def _sized(storages: Iterable[Storage], sizes: Mapping[str, int]) -> list[_Sized]:
    """Those whose bytes are known."""
    return [
        _Sized(each.name, each.first, each.last, _num_bytes(each.type, sizes))
        for each in storages
        if all(symbols.free_symbols(size) <= sizes.keys() for size in each.type.shape)
    ]


def _num_bytes(kind: TensorType, sizes: Mapping[str, int]) -> int:
    numbers = math.prod(symbols.evaluate(size, sizes) for size in kind.shape)
    return -(-element_bytes(kind.dtype) * numbers // ALIGNMENT) * ALIGNMENT


def _fitted(wanted: Sequence[_Sized]) -> tuple[dict[str, int], int]:
    """An offset for each, the largest first: the lowest at which it meets none that is alive together with it."""
    alive: dict[int, list[tuple[int, int]]] = {}  # by step, what is taken then: from which byte to which
    offsets = {}
    for each in sorted(wanted, key=lambda each: (-each.num_bytes, each.first, each.name)):
        steps = range(each.first, each.last + 1)
        taken = sorted({span for step in steps for span in alive.get(step, ())})
        start = 0
        for begin, end in taken:
            if start + each.num_bytes <= begin:
                break
            start = max(start, end)
        offsets[each.name] = start
        for step in steps:
            alive.setdefault(step, []).append((start, start + each.num_bytes))
    return offsets, max((end for spans in alive.values() for _, end in spans), default=0)
