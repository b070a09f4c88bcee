"""Stages of a pipeline: which layers each has, and the graph of one of them, cut out of that of all layers.

A stage has the calls of its layers, their params and their slots of the caches, and what stands between them in `main`.
Values that later stages need are sent, and each stage sends on what it doesn't need itself. What is made of the step's
inputs and of constants alone, such as rotary tables, each stage makes itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from precast.ir.graph.infer import references
from precast.ir.graph.schema import (
    Arg,
    Call,
    Const,
    Dim,
    DtypeArg,
    Expr,
    Graph,
    Items,
    Node,
    Param,
    Pipeline,
    Ref,
    ShardPlan,
    Tie,
    Value,
)
from precast.ir.memory import caches

GROUP = "pp"
"""The ranks that have the same part of each layer, one of each stage."""
MOST_STAGES = 16
"""Into which a plan divides the layers."""


def refusal(plan: ShardPlan, pp: int, num_layers: int) -> str | None:
    """Why a graph with this plan has no `pp` stages; None: it has."""
    known = [1, *(len(each.layers) for each in plan.pipelines)]
    if pp in known:
        return None
    if pp > num_layers:
        return f"pp is {pp}, and the graph calls {num_layers} layers or parts of them: each stage takes at least one"
    if not plan.worlds:
        return f"pp is {pp}, and the bundle was built without a plan of stages"
    why = "" if pp > MOST_STAGES else ": layers that share a cache are not parted"
    return f"pp is {pp}, and the layers can be divided into {', '.join(map(str, known))} stages{why}"


def pipeline(plan: ShardPlan, pp: int) -> Pipeline:
    """The way to divide the layers over `pp` stages; there is one (`refusal`)."""
    return next(each for each in plan.pipelines if len(each.layers) == pp)


def num_layers(graph: Graph) -> int:
    """The calls of `main`: between these a graph can be cut."""
    return sum(isinstance(step, Call) for step in graph.main)


def slot_spans(graph: Graph) -> dict[str, tuple[int, int]]:
    """By cache slot, the first and the last layer that has it, counted from 0; between these a graph can't be cut.

    A node between two calls goes with the later one, one after the last call with that.
    """
    slots = {tensor.name: slot.name for _, slot in caches.slots(graph.caches) for tensor in slot.tensors}
    found: dict[str, tuple[int, int]] = {}
    layer, last = 0, num_layers(graph) - 1
    for step in graph.main:
        here = max(min(layer, last), 0)
        for name in slots.keys() & set(read_by(step)):
            found[slots[name]] = found.get(slots[name], (here, here))[0], here
        layer += isinstance(step, Call)
    return found


class Stage(NamedTuple):
    """The steps `start .. end` of `main`, what comes in from the stage before, and what goes out to the next one."""

    start: int
    end: int
    received: tuple[str, ...]
    sent: tuple[str, ...]


def bounds_of(graph: Graph, layers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The steps of `main` that each stage has, from one up to another, for these numbers of calls."""
    calls = [index for index, step in enumerate(graph.main) if isinstance(step, Call)]
    assert sum(layers) == len(calls), "each layer has a stage"
    cuts = [calls[count - 1] + 1 for count in itertools.accumulate(layers)][:-1]
    return tuple(itertools.pairwise((0, *cuts, len(graph.main))))


def stages_of(graph: Graph, layers: Sequence[int]) -> tuple[Stage, ...]:
    """What each stage has, for these numbers of calls."""
    bounds = bounds_of(graph, layers)
    crossing = [(), *(crossing_at(graph, end) for _, end in bounds[:-1]), ()]
    return tuple(Stage(*bound, crossing[i], crossing[i + 1]) for i, bound in enumerate(bounds))


def crossing_at(graph: Graph, cut: int) -> tuple[str, ...]:
    """The values that steps before `cut` make and later ones, or the graph's outputs, need; in the order of `main`."""
    made_anywhere = made_of_inputs(graph)
    needed = set(graph.outputs.values())
    for step in graph.main[cut:]:
        needed.update(read_by(step))
    before = [value.name for step in graph.main[:cut] for value in step.outputs]
    return tuple(name for name in before if name in needed and name not in made_anywhere)


def made_of_inputs(graph: Graph) -> frozenset[str]:
    """The values of `main` that are made of inputs and constants alone."""
    known = {value.name for value in (*graph.inputs, *graph.constants)}
    found: set[str] = set()
    for step in graph.main:
        if isinstance(step, Node) and step.outputs and known.issuperset(references(step.args)):
            names = {value.name for value in step.outputs}
            known |= names
            found |= names
    return frozenset(found)


def read_by(step: Node | Call) -> Iterable[str]:
    """The names that a step of `main` takes."""
    return references(step.args) if isinstance(step, Node) else step.args.values()


# --- the graph of one stage ------------------------------------------------------------------------------------------


def stage_graph(graph: Graph, layers: Sequence[int], stage: int) -> Graph:
    """The graph of stage `stage`, of a graph that is bound to its ranks. Only the last one has outputs.

    All inputs, cache groups and pools stay, also those that the stage has no layer of: steps are the same for all
    stages. In a plan with slabs a slab keeps its numbers of pages, and has room for the stage's layers alone.
    """
    found = stages_of(graph, layers)[stage]
    own = graph.main[found.start : found.end]
    needed = {name for step in own for name in read_by(step)}
    anywhere = made_of_inputs(graph)
    last = found.end == len(graph.main)
    if last:
        needed.update(graph.outputs.values())
    copied: list[Node | Call] = []
    for step in reversed(graph.main):
        names = {value.name for value in step.outputs}
        if names & anywhere and names & needed:
            needed.update(read_by(step))
            copied.append(step)
    steps = [*reversed(copied), *(step for step in own if not _is_copied(step, anywhere))]
    types = {value.name: value.type for step in graph.main for value in step.outputs}
    received = [_receive(Value(name, types[name]), stage - 1) for name in found.received]
    sent = [_send(name, stage + 1) for name in found.sent]
    used = {name for step in steps for name in read_by(step)}
    blocks = {step.block for step in steps if isinstance(step, Call)}
    return msgspec.structs.replace(
        graph,
        params=_params(graph.params, used),
        constants=tuple(value for value in graph.constants if value.name in used),
        blocks=tuple(block for block in graph.blocks if block.name in blocks),
        main=(*received, *steps, *sent),
        outputs=graph.outputs if last else {},
        caches=caches.with_slots(graph.caches, lambda slot: any(each.name in used for each in slot.tensors)),
    )


def _is_copied(step: Node | Call, anywhere: frozenset[str]) -> bool:
    return any(value.name in anywhere for value in step.outputs)


def _receive(value: Value, source: int) -> Node:
    sizes = Items(tuple(_size(size) for size in value.type.shape))
    args: dict[str, Arg] = {
        "shape": sizes,
        "dtype": DtypeArg(value.type.dtype),
        "group": Const(GROUP),
        "source": Const(source),
    }
    return Node("precast.receive", args, (value,))


def _size(size: Expr) -> Const | Dim:
    return Const(size) if isinstance(size, int) else Dim(size)


def _send(name: str, target: int) -> Node:
    return Node("precast.send", {"x": Ref(name), "group": Const(GROUP), "target": Const(target)}, ())


def _params(params: Sequence[Param], used: set[str]) -> tuple[Param, ...]:
    """Those that are used. Where a param is tied to one of another stage, it is made here as that one is there."""
    recipes = {param.name: param.recipe for param in params}
    first: dict[str, str] = {}
    kept = []
    for param in params:
        if param.name not in used:
            continue
        if isinstance(param.recipe, Tie) and param.recipe.param not in used:
            other = first.setdefault(param.recipe.param, param.name)
            recipe = recipes[param.recipe.param] if other == param.name else Tie(other)
            param = Param(param.name, param.type, recipe)
        kept.append(param)
    return tuple(kept)
