"""What a pass is, how a function becomes one, and what several passes rely on.

A pass is a function `(graph, ctx) -> bool` that edits the graph and says whether it changed anything. Most look at one
call at a time: those are functions `(ctx, node) -> new node or None`, registered by `node_pass`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from precast.builder.graph.context import FxGraph, FxNode, PassContext
from precast.builder.graph.nodes import op_counts
from precast.ir.graph.schema import Graph

STAGES = ("factory", "export", "normalise", "match", "shard", "cache", "plan", "lower", "pack")

PassFunction = Callable[[FxGraph, PassContext], bool]
LoweredFunction = Callable[[Graph], Graph]
NodeFunction = Callable[[PassContext, FxNode], FxNode | None]
Invariant = Callable[[FxGraph], set[str]]
"""Something that holds for a graph: gives what contradicts it, by name. Its docstring says it in words."""


@dataclasses.dataclass(frozen=True)
class Pass:
    """A registered pass. A change of what it does is a new version: snapshots and manifests name it."""

    name: str
    stage: str
    version: int
    run: PassFunction
    requires: tuple[str, ...] = ()
    """Passes that must have run."""
    before: tuple[Invariant, ...] = ()
    """What the pass relies on."""
    after: tuple[Invariant, ...] = ()
    """What others may rely on when it has run."""


@dataclasses.dataclass(frozen=True)
class LoweredPass:
    """A pass over the bundle's own graph, which it gives anew: it sees each block once, and needs no torch."""

    name: str
    version: int
    run: LoweredFunction
    stage: str = "lower"


def lowered_pass(*, version: int) -> Callable[[LoweredFunction], LoweredPass]:
    """Makes a `LoweredPass` of a function; its name is the function's."""
    return lambda function: LoweredPass(function.__name__, version, function)


def graph_pass(
    *, stage: str, version: int, requires: tuple[str, ...] = (), before: tuple[Invariant, ...] = (),
    after: tuple[Invariant, ...] = (),
) -> Callable[[PassFunction], Pass]:  # fmt: skip
    """Makes a `Pass` of a function; its name is the function's."""
    assert stage in STAGES
    return lambda function: Pass(function.__name__, stage, version, function, requires, before, after)


def node_pass(
    *, stage: str, version: int, requires: tuple[str, ...] = (), before: tuple[Invariant, ...] = ()
) -> Callable[[NodeFunction], Pass]:
    """Makes a `Pass` of a function that is asked for each call what to put in its place; None leaves it.

    The nodes that the function makes stand before the call, and belong to its layer.
    """

    def register(function: NodeFunction) -> Pass:
        def run(graph: FxGraph, ctx: PassContext) -> bool:
            changed = False
            for node in list(graph.nodes):
                if node.op != "call_function":
                    continue
                with ctx.before(node):
                    new = function(ctx, node)
                if new is not None:
                    ctx.replace(node, new)
                    changed = True
            return changed

        run.__module__, run.__doc__ = function.__module__, function.__doc__
        return Pass(function.__name__, stage, version, run, requires, before)

    return register


aten = torch.ops.aten

VIEWS = frozenset(
    (aten.view.default, aten._unsafe_view.default, aten.flatten.using_ints, aten.unflatten.int, aten.view_as.default,
     aten.reshape_as.default)
)  # fmt: skip
"""Other spellings of `reshape`."""

CONVERSIONS = frozenset((aten.to.device, aten.to.dtype_layout, aten.type_as.default, aten._to_copy.default))
"""Other spellings of `to.dtype`: a graph has one device."""


def one_spelling_of_views(graph: FxGraph) -> set[str]:
    """A tensor is looked at otherwise by `reshape`, and converted by `to.dtype`."""
    return {str(node.target) for node in graph.nodes if node.target in VIEWS | CONVERSIONS}


def all_have_caches(graph: FxGraph) -> set[str]:
    """Attention reads its keys and values from a cache, and recurrences go on from a state."""
    names = [name for name in op_counts(graph) if name.startswith("precast.")]
    return {name for name in names if _has("paged", name) or _has("stateful", name)}


def _has(form: str, name: str) -> bool:
    """Whether there is an op that does the same with a cache."""
    return hasattr(torch.ops.precast, name.replace("precast.", f"{form}_"))
