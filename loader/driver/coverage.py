"""Whether the driver alone runs a model, and if not, what stands in the way. No torch, and no GPU.

It runs a graph if every op, in every size class that a step of the engine's limits may have, is computed by launches
(data) or is a view; and if the bundle's native layer has their kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from precast.ir.errors import BundleError, TargetError
from precast.ir.graph import symbols
from precast.ir.graph.schema import Block, Graph, Node, Value
from precast.ir.memory import caches, strides
from precast.ir.memory.addresses import Addresses
from precast.ir.native import NativeLayer
from precast.ir.weights.tensorfile import element_bytes
from precast.kernels import step_memory
from precast.kernels.choices import runnable
from precast.kernels.native import Native
from precast.kernels.sampling.limits import SAMPLE_VERSION
from precast.kernels.step_launches import (
    DrawnPart,
    LaunchAt,
    drawing_launches,
    known_ids_launches,
    part_drawing_launches,
)
from precast.kernels.use import Target, statics_in, types_in, use_of
from precast.loader.device import Buffer
from precast.loader.driver.collectives import Collectives
from precast.loader.driver.placed import ACTIVATIONS, OUTPUT, WORKSPACE, NotCoveredError, Number
from precast.loader.driver.program import NativeProgram, Sizes, covered_cases, is_view
from precast.loader.sizing import EngineLimits

_TRIED = ((7, 3), (1, 1), (64, 64))
"""Tokens and sequences of steps in which views are looked at; of what is larger, strides differ in sizes alone."""


def most_sizes(graph: Graph, limits: EngineLimits) -> dict[str, int]:
    """The largest sizes of a step of an engine."""
    return step_memory.step_sizes(
        graph, max_num_tokens=limits.max_num_tokens, max_num_seqs=limits.max_num_seqs, max_seq_len=limits.max_seq_len,
        num_pages={},
    )  # fmt: skip


def covered(
    graph: Graph, target: Target, limits: EngineLimits, collectives: Collectives | None = None
) -> tuple[NativeProgram, Addresses]:
    """The graph as launches, and where its values lie; it is verified and bound to its world. `collectives`: of ranks.

    Raises NotCoveredError with the first op that stands in the way, and BundleError for sizes without a value.
    """
    most, target = most_sizes(graph, limits), target.without_torch
    logits = types_in(graph)[graph.outputs["logits"]]
    if not runnable("precast.sample", SAMPLE_VERSION, target, control="static", dtypes={"logits": logits.dtype}):
        raise NotCoveredError(f"precast.sample of {logits.dtype} is computed by torch")
    program = NativeProgram(graph, target, most, collectives)
    addresses = step_memory.addresses_of(graph, target, most)
    anywhere = Anywhere(graph, () if collectives is None else collectives.names)
    for num_tokens, num_seqs in _TRIED:
        sizes = most | {pool.pages: 1 for pool in graph.caches.pools}
        sizes |= {name: min(most[name], tried) for name, tried in (("T", num_tokens), ("B", num_seqs), ("R", num_seqs))}
        for _ in program.ready_once(sizes, anywhere.of(sizes), addresses):
            pass
    return program, addresses


def uncovered(graph: Graph, target: Target, limits: EngineLimits) -> list[str]:
    """What stands in the way of a verified graph that is bound to its world, each of it once: empty if nothing does."""
    most, target = most_sizes(graph, limits), target.without_torch
    functions: list[Graph | Block] = [graph, *graph.blocks]
    found = dict.fromkeys(why for function in functions for why in _uncovered(function, target, most))
    if not found:
        try:
            covered(graph, target, limits)
        except (NotCoveredError, BundleError) as error:
            found[str(error)] = None
    return list(found)


def lacking(
    program: NativeProgram, graph: Graph, addresses: Addresses, layer: NativeLayer, most: Sizes,
    part: DrawnPart | None = None,
) -> list[str]:  # fmt: skip
    """The kernels of steps of up to these sizes that a layer doesn't have, by name: of one step of each class. `part`:
    what a rank has of the logits."""
    anywhere = Anywhere(graph, () if program.collectives is None else program.collectives.names)
    native, wanted = Native(layer), set[tuple[str, str, tuple[int, ...]]]()
    for tokens, count in _steps_of_classes(program, most):
        sizes = {**most, "T": tokens, "B": count, "R": count} | {pool.pages: 1 for pool in graph.caches.pools}
        for each in program.ready_once(sizes, anywhere.of(sizes), addresses):
            if each.key:
                wanted.add((each.launch.kernel, each.key, _integers(each.values)))
        for launch in beside_the_graph(graph, program.target, tokens, count, part):
            wanted.add((launch.launch.kernel, launch.key, tuple(launch.values())))
    return sorted({kernel for kernel, key, values in wanted if native.find(key, values) is None})


def beside_the_graph(
    graph: Graph, target: Target, num_tokens: int, num_rows: int, part: DrawnPart | None = None
) -> Iterator[LaunchAt]:
    """What a step launches before the graph and behind it: tokens are put in their places, and drawn. `part`: what a
    rank has of the logits."""
    logits = types_in(graph)[graph.outputs["logits"]]
    yield from known_ids_launches(target, num_tokens)
    if part is None:
        yield from drawing_launches(logits, target, num_rows, captured=True)
    else:
        yield from part_drawing_launches(logits.dtype, target, num_rows, part)


def _steps_of_classes(program: NativeProgram, most: Sizes) -> list[tuple[int, int]]:
    """Tokens and sequences of steps at the ends of the classes of sizes, with the fewest sequences and the most."""
    ends = {symbol: {1, most[symbol]} for symbol in ("T", "B", "R")}
    for symbol, numbers in program.ends.items():
        ends[symbol] |= {number for number in numbers if 1 <= number <= most[symbol]}
    steps = {(tokens, count) for tokens in ends["T"] for count in (1, min(tokens, most["B"]))}
    return sorted(steps | {(max(count, 1), count) for count in ends["B"] | ends["R"]})


def _integers(values: Sequence[Number]) -> tuple[int, ...]:
    """Arguments as conditions on kernels see them."""
    return tuple(value if isinstance(value, int) else 0 for value in values)


def _uncovered(function: Graph | Block, target: Target, most: Sizes) -> Iterator[str]:
    types, statics = types_in(function), statics_in(function)
    for node in function.main if isinstance(function, Graph) else function.nodes:
        if not isinstance(node, Node):
            continue
        use = use_of(node, types, target, statics)
        try:
            if not is_view(use):
                covered_cases(use, most)
        except (NotCoveredError, TargetError) as error:
            yield str(error)


class Anywhere:
    """Memory of the right shapes, all at one address, which nobody looks at; pages of caches lie apart as they will."""

    def __init__(self, graph: Graph, others: Sequence[str]) -> None:
        """`others`: the names of what ranks share."""
        plan = caches.with_slabs(graph.caches)
        self._apart = {
            value.name: caches.page_stride(plan, group.pool) // element_bytes(value.type.dtype)
            for group, slot in caches.slots(plan) for value in slot.tensors
        }  # fmt: skip
        self._sized = (*graph.constants, *graph.inputs, *caches.tensors(graph.caches))
        names = (ACTIVATIONS, WORKSPACE, *others, *(OUTPUT + value for value in graph.outputs.values()))
        self._always = {name: Buffer(0, "uint8", (0,), (1,), None) for name in names}
        self._always |= {param.name: self._buffer(Value(param.name, param.type), {}) for param in graph.params}

    def of(self, sizes: Sizes) -> dict[str, Buffer]:
        """In a step of these sizes."""
        return self._always | {value.name: self._buffer(value, sizes) for value in self._sized}

    def _buffer(self, value: Value, sizes: Sizes) -> Buffer:
        shape = tuple([symbols.evaluate(size, sizes) for size in value.type.shape])
        steps = strides.contiguous(shape).strides
        if value.name in self._apart:
            steps = (self._apart[value.name], *steps[1:])
        return Buffer(0, value.type.dtype, shape, steps, None)
