"""Whether the driver alone runs a model, and if not, what stands in the way. No torch, and no GPU.

It runs a graph if every op, in every size class that a step of the engine's limits may have, is computed by launches
(data) or is a view; and if the bundle's native layer has their kernels.
"""

from __future__ import annotations

from collections import defaultdict
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
from precast.kernels.records import Ranges
from precast.kernels.sampling.launches import rows_apart
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
from precast.loader.driver.node_ways import Sizes, covered_cases, is_view
from precast.loader.driver.placed import ACTIVATIONS, OUTPUT, WORKSPACE, NotCoveredError, Number
from precast.loader.driver.program import Launching, NativeProgram
from precast.loader.sizing import EngineLimits

_TRIED = ((7, 3), (1, 1), (64, 64))
"""Tokens and sequences of steps in which views are looked at; of what is larger, strides differ in sizes alone."""


def most_sizes(graph: Graph, limits: EngineLimits) -> dict[str, int]:
    """The largest sizes of a step of an engine."""
    return step_memory.step_sizes(
        graph, max_num_tokens=limits.max_num_tokens, max_num_seqs=limits.max_num_seqs, max_seq_len=limits.max_seq_len,
        num_pages={},
    )  # fmt: skip


def held_sizes(graph: Graph, limits: EngineLimits) -> dict[str, int]:
    """The same with page lists as long as those of captured steps become, whatever pools have: by them goes what
    launches hold that keep something for each slot."""
    lists = {
        group.name: limits.num_rows * caches.peak_pages(group, limits.max_seq_len, limits.max_num_tokens)
        for group in graph.caches.groups
    }
    return step_memory.step_sizes(
        graph, max_num_tokens=limits.max_num_tokens, max_num_seqs=limits.max_num_seqs, max_seq_len=limits.max_seq_len,
        num_pages=lists,
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
    addresses = step_memory.addresses_of_written(graph, program.written, most)
    anywhere = Anywhere(graph, () if collectives is None else collectives.names)
    for num_tokens, num_seqs in _TRIED:
        sizes = most | {pool.pages: 1 for pool in graph.caches.pools}
        sizes |= {name: min(most[name], tried) for name, tried in (("T", num_tokens), ("B", num_seqs), ("R", num_seqs))}
        program.ready(sizes, anywhere.of(sizes), addresses)
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
) -> Iterator[set[str]]:  # fmt: skip
    """The kernels of steps of up to these sizes that a layer doesn't have, by name: of the least and the largest step
    of each class, and of one between, step by step, as that takes a while. `part`: what a rank has of the logits."""
    anywhere = Anywhere(graph, () if program.collectives is None else program.collectives.names)
    native, seen = Native(layer), set[tuple[str, tuple[int, ...]]]()
    steps: defaultdict[tuple[int, int, int], list[Launching]] = defaultdict(list)

    def is_lacking(key: str, values: tuple[int, ...]) -> bool:
        is_new = (key, values) not in seen
        seen.add((key, values))
        return is_new and native.find(key, values) is None

    # What a kernel takes whatever its arguments are need not be laid out.
    for ranges, launching in program.classes(lambda each: bool(each.key) and not native.takes_all(each.key)):
        for step in steps_within(ranges, most):
            steps[step] += launching
    pages = {pool.pages: 1 for pool in graph.caches.pools}
    for (tokens, count, rows), launching in steps.items():
        sizes = {**most, **pages, "T": tokens, "B": count, "R": rows}
        ready = program.ready_alone(launching, sizes, anywhere.of(sizes), addresses)
        yield {each.launch.kernel for each in ready if each.key and is_lacking(each.key, _integers(each.values))}
    drawn = [(tokens, rows) for tokens, _, rows in steps_within({}, most)]
    drawn += [(rows, rows) for rows in rows_apart(most["R"])]
    for tokens, rows in drawn:
        launches = beside_the_graph(graph, program.target, tokens, rows, part)
        yield {each.launch.kernel for each in launches if is_lacking(each.key, tuple(each.values()))}


def steps_within(ranges: Ranges, most: Sizes) -> list[tuple[int, int, int]]:
    """Tokens, sequences and rows of logits of the least and of the largest step for which they lie in these ranges, and
    of one between, each once; none if there is no such step. No step has fewer tokens than sequences, or than rows."""
    low = {symbol: max(ranges.get(symbol, (1, None))[0], 1) for symbol in ("T", "B", "R")}
    ends = {symbol: ranges.get(symbol, (1, None))[1] for symbol in low}
    high = {symbol: most[symbol] if end is None else min(end, most[symbol]) for symbol, end in ends.items()}
    low["B"] = max(low["B"], low["R"])
    low["T"] = max(low["T"], low["B"])
    high["B"] = min(high["B"], high["T"])
    high["R"] = min(high["R"], high["B"])
    if any(low[symbol] > high[symbol] for symbol in low):
        return []
    between = {symbol: min(low[symbol] + 1 + low[symbol] % 2, high[symbol]) for symbol in low}  # uneven numbers
    return list(dict.fromkeys((sizes["T"], sizes["B"], sizes["R"]) for sizes in (low, between, high)))


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
        self._inputs = graph.inputs
        names = (ACTIVATIONS, WORKSPACE, *others, *(OUTPUT + value for value in graph.outputs.values()))
        self._always = {name: Buffer(0, "uint8", (0,), (1,), None) for name in names}
        pages = {pool.pages: 1 for pool in graph.caches.pools}
        kept = (
            *graph.constants,
            *caches.tensors(graph.caches),
            *(Value(each.name, each.type) for each in graph.params),
        )
        self._always |= {value.name: self._buffer(value, pages) for value in kept}

    def of(self, sizes: Sizes) -> dict[str, Buffer]:
        """In a step of these sizes."""
        return self._always | {value.name: self._buffer(value, sizes) for value in self._inputs}

    def _buffer(self, value: Value, sizes: Sizes) -> Buffer:
        shape = tuple([symbols.evaluate(size, sizes) for size in value.type.shape])
        steps = strides.contiguous(shape).strides
        if value.name in self._apart:
            steps = (self._apart[value.name], *steps[1:])
        return Buffer(0, value.type.dtype, shape, steps, None)
