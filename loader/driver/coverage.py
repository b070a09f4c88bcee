"""Whether the driver alone runs a model, and if not, what stands in the way. No torch, and no GPU.

It runs a graph if every op, in every size class that a step of the engine's limits may have, is computed by launches
(data) or is a view; and if the bundle's native layer has their kernels.
"""

from __future__ import annotations

from collections.abc import Iterator

from precast.ir.errors import BundleError, TargetError
from precast.ir.graph import symbols
from precast.ir.graph.schema import Block, Graph, Node, Value
from precast.ir.memory import caches, strides
from precast.ir.memory.addresses import Addresses
from precast.kernels import step_memory
from precast.kernels.choices import runnable
from precast.kernels.sampling.limits import SAMPLE_VERSION
from precast.kernels.use import Target, statics_in, types_in, use_of
from precast.loader.device import Buffer
from precast.loader.driver.program import (
    ACTIVATIONS,
    OUTPUT,
    WORKSPACE,
    NativeProgram,
    NotCoveredError,
    Sizes,
    covered_cases,
    is_view,
)
from precast.loader.sizing import EngineLimits

_TRIED = ((7, 3), (1, 1), (64, 64))
"""Tokens and sequences of steps in which views are looked at; of what is larger, strides differ in sizes alone."""


def most_sizes(graph: Graph, limits: EngineLimits) -> dict[str, int]:
    """The largest sizes of a step of an engine."""
    return step_memory.step_sizes(
        graph, max_num_tokens=limits.max_num_tokens, max_num_seqs=limits.max_num_seqs, max_seq_len=limits.max_seq_len,
        num_pages={},
    )  # fmt: skip


def covered(graph: Graph, target: Target, limits: EngineLimits) -> tuple[NativeProgram, Addresses]:
    """The graph as launches, and where its values lie; it is verified and bound to its world.

    Raises NotCoveredError with the first op that stands in the way, and BundleError for sizes without a value.
    """
    most, target = most_sizes(graph, limits), target.without_torch
    logits = types_in(graph)[graph.outputs["logits"]]
    if not runnable("precast.sample", SAMPLE_VERSION, target, control="static", dtypes={"logits": logits.dtype}):
        raise NotCoveredError(f"precast.sample of {logits.dtype} is computed by torch")
    program = NativeProgram(graph, target, most)
    addresses = step_memory.addresses_of(graph, target, most)
    for num_tokens, num_seqs in _TRIED:
        sizes = most | {pool.pages: 1 for pool in graph.caches.pools}
        sizes |= {name: min(most[name], tried) for name, tried in (("T", num_tokens), ("B", num_seqs), ("R", num_seqs))}
        program.ready(sizes, _anywhere(graph, sizes), addresses)
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


def _anywhere(graph: Graph, sizes: Sizes) -> dict[str, Buffer]:
    """Memory of the right shapes at addresses that nobody looks at."""
    params = [Value(param.name, param.type) for param in graph.params]
    found = {}
    for value in (*params, *graph.constants, *graph.inputs, *caches.tensors(graph.caches)):
        shape = tuple(symbols.evaluate(size, sizes) for size in value.type.shape)
        found[value.name] = Buffer(0, value.type.dtype, shape, strides.contiguous(shape).strides, None)
    for name in (ACTIVATIONS, WORKSPACE, *(OUTPUT + value for value in graph.outputs.values())):
        found[name] = Buffer(0, "uint8", (0,), (1,), None)
    return found
