"""A graph on one of several ranks, in which a sum over ranks and the residual norm after it are one node.

The sum is often a layer's last node and the norm the next layer's first. Then the layer returns its part of the sum,
wherever it is called. In a bundle, whose layers serve any number of ranks, a layer returns what is whole (`IR063`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from precast.ir.graph.alone import renamed
from precast.ir.graph.infer import references
from precast.ir.graph.schema import Arg, Call, Const, Graph, Node, Ref
from precast.ir.ops.rows_collectives import GROUPS

SUM, NORM = "precast.all_reduce", "precast.residual_rms_norm"
BOTH = "precast.all_reduce_residual_rms_norm"
GROUP = Const(GROUPS[0])

Place = tuple[str, str]
"""A block, and one of its inputs, or a sum that it returns."""


class _Function(NamedTuple):
    """A block or `main`: its steps, and its sums by name.

    `partners`: what a norm alone takes, by name, with what the norm adds to it. `uses`: how often a name is taken.
    """

    steps: Sequence[Node | Call]
    sums: dict[str, Node]
    partners: dict[str, str]
    uses: Counter[str]


class _Parts(NamedTuple):
    """What is no sum any more, but a rank's part of it: sums that blocks return, and inputs of blocks."""

    leaving: set[Place]
    entering: set[Place]


def with_normed_sums(graph: Graph) -> Graph:
    """The graph, bound to a world of several ranks, with `all_reduce_residual_rms_norm` where a norm alone takes a sum.

    Equal results, but for that: what returns a part of a sum is always followed by the norm that adds it up.
    """
    blocks = {block.name: _function(block.nodes, block.outputs) for block in graph.blocks}
    main = _function(graph.main, graph.outputs.values())
    parts = _parts(graph, blocks, main)
    made = []
    for block in graph.blocks:
        own = {name for place, name in parts.leaving | parts.entering if place == block.name}
        nodes, names = _rewritten(blocks[block.name], own)
        outputs = tuple(names.get(name, name) for name in block.outputs)
        made.append(msgspec.structs.replace(block, nodes=nodes, outputs=outputs))
    steps, _ = _rewritten(main, _in_main(graph, main, parts))
    return msgspec.structs.replace(graph, blocks=tuple(made), main=steps)


def _function(steps: Sequence[Node | Call], returned: Iterable[str]) -> _Function:
    uses = Counter(returned)
    for step in steps:
        uses.update(references(step.args) if isinstance(step, Node) else step.args.values())
    sums = {step.outputs[0].name: step for step in steps if isinstance(step, Node) and step.op == SUM}
    partners: dict[str, str] = {}
    for step in steps:
        if isinstance(step, Node) and step.op == NORM:
            x, residual = _name(step.args["x"]), _name(step.args["residual"])
            partners |= {one: other for one, other in ((x, residual), (residual, x)) if uses[one] == 1}
    return _Function(steps, sums, partners, uses)


def _name(arg: Arg) -> str:
    assert isinstance(arg, Ref), "it fits the signature"
    return arg.name


def _parts(graph: Graph, blocks: dict[str, _Function], main: _Function) -> _Parts:
    """What can be a part at every call: all that leaves goes to a norm, and all that enters was a sum."""
    parts = _Parts(set(), set())
    for block in graph.blocks:
        own = blocks[block.name]
        parts.leaving.update((block.name, name) for name in own.sums if own.uses[name] == 1 and name in block.outputs)
        parts.entering.update(
            (block.name, value.name) for value in block.inputs
            if value.name in own.partners and own.partners[value.name] not in own.sums
        )  # fmt: skip
    before = -1
    while before != len(parts.leaving) + len(parts.entering):
        before = len(parts.leaving) + len(parts.entering)
        named = _in_main(graph, main, parts)
        for step in main.steps:
            if isinstance(step, Call):
                lost = {(step.block, formal) for formal, actual in step.args.items() if actual not in named}
                parts.entering.difference_update(lost)
        for name, value in sorted(parts.entering):
            if (name, value) in parts.entering:
                parts.entering.discard((name, blocks[name].partners[value]))  # a norm takes one part
        taken = {actual for step in main.steps if isinstance(step, Call) for formal, actual in step.args.items()
                 if (step.block, formal) in parts.entering}  # fmt: skip
        taken |= {name for name, other in main.partners.items() if other not in main.sums and other not in named}
        for value, place in _returned(graph, main).items():
            if main.uses[value] != 1 or value not in taken:
                parts.leaving.discard(place)
    return parts


def _returned(graph: Graph, main: _Function) -> dict[str, Place]:
    """By each name that a call makes in `main`, what the block returns there."""
    outputs = {block.name: block.outputs for block in graph.blocks}
    return {
        value.name: (step.block, name) for step in main.steps if isinstance(step, Call)
        for value, name in zip(step.outputs, outputs[step.block], strict=True)
    }  # fmt: skip


def _in_main(graph: Graph, main: _Function, parts: _Parts) -> set[str]:
    """The names in `main` that are parts: what calls return, and sums that one call takes as a part."""
    found = {value for value, place in _returned(graph, main).items() if place in parts.leaving}
    for step in main.steps:
        if isinstance(step, Call):
            found |= {actual for formal, actual in step.args.items() if (step.block, formal) in parts.entering
                      and actual in main.sums and main.uses[actual] == 1}  # fmt: skip
    return found


def _rewritten(function: _Function, parts: set[str]) -> tuple[tuple[Node | Call, ...], dict[str, str]]:
    """The steps, where these names are parts; and by the name of each sum that is gone, that of its part."""
    normed = {name for name in function.partners if name in function.sums or name in parts}
    normed -= {other for name, other in function.partners.items() if name in normed and other > name}
    names = {name: _name(node.args["x"]) for name, node in function.sums.items() if name in normed | parts}
    steps: list[Node | Call] = []
    for step in function.steps:
        if isinstance(step, Call):
            steps.append(msgspec.structs.replace(step, args={k: names.get(v, v) for k, v in step.args.items()}))
        elif step.op == NORM and (found := normed.intersection(references(step.args))):
            (part,) = found
            args = {name: renamed(arg, names) for name, arg in step.args.items()}
            args |= {"x": Ref(names.get(part, part)), "residual": Ref(function.partners[part])}
            steps.append(msgspec.structs.replace(step, op=BOTH, version=1, args=args | {"group": GROUP}))
        elif not (step.op == SUM and step.outputs[0].name in names):
            steps.append(step)
    return tuple(steps), names
