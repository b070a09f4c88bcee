"""Pipelines: how the layers are divided over stages, so that the largest has as few bytes of params as can be.

The embedding counts as the first layer's, the head as the last one's. Layers that have a slot of a cache in common are
not parted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from precast.ir.graph import symbols
from precast.ir.graph.schema import Call, Graph, Pipeline, TensorType, Tie
from precast.ir.graph.stages import MOST_STAGES, num_layers, read_by, slot_spans
from precast.ir.graph.world import UNSHARDED
from precast.ir.weights.tensorfile import element_bytes


def pipelines(graph: Graph) -> tuple[Pipeline, ...]:
    """The best way to divide the layers over 2 stages, over 3, and so on. Each stage has at least one layer.

    Numbers of stages into which they can't be divided are left out.
    """
    bounds = _bounds(graph)
    costs = _costs(graph, bounds)
    last = len(bounds) - 1
    # By the number of stages and the bound at which they end: the largest stage, the sum of squares, where it begins.
    best: list[dict[int, tuple[int, int, int]]] = [{0: (0, 0, 0)}]
    for _ in range(min(MOST_STAGES, last)):
        found: dict[int, tuple[int, int, int]] = {}
        for end in range(1, last + 1):
            ways = [
                (max(largest, costs[start, end]), squares + costs[start, end] ** 2, start)
                for start, (largest, squares, _) in best[-1].items()
                if start < end
            ]
            if ways:
                found[end] = min(ways)
        best.append(found)
    return tuple(Pipeline(_way(best, bounds, count)) for count in range(2, len(best)) if last in best[count])


def _way(best: Sequence[Mapping[int, tuple[int, int, int]]], bounds: Sequence[int], count: int) -> tuple[int, ...]:
    """The layers of each of `count` stages."""
    ends = [len(bounds) - 1]
    for left in range(count, 0, -1):
        ends.append(best[left][ends[-1]][2])
    return tuple(bounds[end] - bounds[start] for start, end in itertools.pairwise(reversed(ends)))


def _bounds(graph: Graph) -> list[int]:
    """Before which layers a graph can be cut, by their number; 0 and the number of all of them included."""
    inside = {cut for first, last in slot_spans(graph).values() for cut in range(first + 1, last + 1)}
    return [cut for cut in range(num_layers(graph) + 1) if cut not in inside]


def _costs(graph: Graph, bounds: Sequence[int]) -> dict[tuple[int, int], int]:
    """The bytes of the params of each stage that there could be, from one bound to another."""
    sizes = {param.name: _num_bytes(param.type) for param in graph.params}
    memory = {param.name: param.recipe.param if isinstance(param.recipe, Tie) else param.name for param in graph.params}
    taken: list[set[str]] = [set()]  # by layer; nodes before the first call are its own, those after a call the next's
    for step in graph.main:
        taken[-1].update(memory[name] for name in read_by(step) if name in memory)
        if isinstance(step, Call):
            taken.append(set())
    taken[-2:] = [set().union(*taken[-2:])]
    found = {}
    for i in range(len(bounds) - 1):
        params: set[str] = set()
        for j in range(i + 1, len(bounds)):
            params.update(*taken[bounds[j - 1] : bounds[j]])
            found[i, j] = sum(sizes[name] for name in params)
    return found


def _num_bytes(kind: TensorType) -> int:
    return math.prod(symbols.evaluate(size, UNSHARDED) for size in kind.shape) * element_bytes(kind.dtype)
