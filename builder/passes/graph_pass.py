"""What a pass is, and how a function becomes one.

A pass is a function `(graph, ctx) -> bool` that edits the graph and says whether it changed anything. Most look at one
call at a time: those are functions `(ctx, node) -> new node or None`, registered by `node_pass`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from precast.builder.graph.context import FxGraph, FxNode, PassContext

STAGES = ("factory", "export", "normalise", "match", "shard", "cache", "plan", "lower", "pack")

PassFunction = Callable[[FxGraph, PassContext], bool]
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
