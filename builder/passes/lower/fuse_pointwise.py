"""Arithmetic that no named op covers, in one launch: chains and trees of pointwise ops and sums along rows become
`precast.fused` nodes.

This is the last rewriting, of the bundle's own graph: what named fusions left is known there, a block is looked at once
for all its layers, and whether ops can be fused is a question for the shape rule of `precast.fused`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from precast.builder.passes.graph_pass import lowered_pass
from precast.builder.passes.lower.spelled_out import spelled_norms, types_of
from precast.ir import limits
from precast.ir.graph import schema as ir
from precast.ir.graph.infer import flat, references
from precast.ir.memory import caches
from precast.ir.ops.checks import COMPUTED
from precast.ir.ops.op import ShapeError
from precast.ir.ops.rows_fused import FUNCTIONS, MAX_OPERANDS, fills_rows, space, step_types

_Region = tuple[int, ...]
"""The places of the nodes that become one, ascending."""


@lowered_pass(version=2)
def fuse_pointwise(graph: ir.Graph) -> ir.Graph:
    """y = f(g(x), h(x, z)) -> fused(x, z), where nothing else stands between, in main and in each block.

    Greedy, in the order of the nodes: a node joins the regions that make its arguments, one by one, and then those that
    make other arguments of an op that takes its result, if what they become can still be computed where the node
    stands. Regions of one node stay as they are. No node moves past one that takes its result, and what a cache holds
    is no operand: it may be written in between.
    """
    blocks = tuple(
        msgspec.structs.replace(block, nodes=_fused(block.nodes, types_of(block), block.outputs, _names(block.caches)))
        for block in graph.blocks
    )
    held = _names(caches.tensors(graph.caches))
    main = _fused(graph.main, types_of(graph), graph.outputs.values(), held)
    return msgspec.structs.replace(graph, blocks=blocks, main=main)


def _names(values: Iterable[ir.Value]) -> set[str]:
    return {value.name for value in values}


def _fused(
    steps: Sequence[ir.Node | ir.Call], types: Mapping[str, ir.TensorType], outputs: Iterable[str],
    held: Collection[str],
) -> tuple[Any, ...]:  # fmt: skip
    """The steps of a function with fused nodes; `held` are the names of its caches.

    Gated norms of heads are spelled out where all of their steps become a part of such nodes.
    """
    returned = set(outputs)
    spelled = spelled_norms(steps, types, returned)
    new = {value.name: value.type for step in spelled for value in step.outputs}
    made = _joined(spelled, {**types, **new}, returned, held)
    if all(value.name in types for step in made for value in step.outputs):
        return made
    return _joined(steps, types, returned, held)


def _joined(
    steps: Sequence[ir.Node | ir.Call], types: Mapping[str, ir.TensorType], outputs: set[str], held: Collection[str]
) -> tuple[Any, ...]:
    regions = _Regions(steps, types, outputs, held)
    regions.grow()
    last = {region[-1]: region for region in regions.all()}
    inside = {place for region in last.values() for place in region}
    made: list[Any] = [
        regions.node(last[place]) if place in last else step
        for place, step in enumerate(steps)
        if place in last or place not in inside
    ]
    return tuple(made)


class _Body(NamedTuple):
    """A region as the fused op takes it: its operands by their names in the graph, its steps, the values it returns."""

    operands: tuple[str, ...]
    steps: ir.Steps
    values: tuple[ir.Value, ...]


class _Regions:
    """The regions of a function as they grow."""

    def __init__(
        self, steps: Sequence[ir.Node | ir.Call], types: Mapping[str, ir.TensorType], outputs: set[str],
        held: Collection[str],
    ) -> None:  # fmt: skip
        self._steps = steps
        self._types = types
        self._outputs = outputs
        self._users: dict[str, list[int]] = {}
        for place, step in enumerate(steps):
            for name in _taken(step):
                self._users.setdefault(name, []).append(place)
        self._candidates = _candidates(steps, held)
        self._made = {value.name: place for place in self._candidates for value in steps[place].outputs}
        self._region_of: dict[int, _Region] = {}

    def grow(self) -> None:
        """Every candidate joins what makes its arguments, and what is taken beside its result."""
        for place in self._candidates:
            region: _Region = (place,)
            if not self._can_become_one(region):
                continue
            for maker in (*reversed(self._makers(place)), *self._beside(place)):
                joined = tuple(sorted({*region, *self._region_of.get(maker, ())}))
                if joined != region and self._can_become_one(joined):
                    region = joined
            self._region_of.update(dict.fromkeys(region, region))

    def _makers(self, place: int) -> list[int]:
        """The candidates that make arguments of a step, in order."""
        return sorted({self._made[name] for name in _taken(self._steps[place]) if name in self._made})

    def _beside(self, place: int) -> list[int]:
        """The candidates before it that make other arguments of an op that takes its result and is none itself."""
        takers = [user for user in self._users_of(place) if user not in self._made.values()]
        return [maker for user in takers for maker in self._makers(user) if maker < place]

    def all(self) -> list[_Region]:
        """The regions of more than one node that the op takes as they are in the end."""
        found = dict.fromkeys(region for region in self._region_of.values() if len(region) > 1)
        return [region for region in found if self._is_taken(self._body(region), definite=False)]

    def node(self, region: _Region) -> ir.Node:
        """The region as one node."""
        operands, steps, values = self._body(region)
        args: dict[str, ir.Arg] = {f"x{i}": ir.Ref(name) for i, name in enumerate(operands)}
        return ir.Node("precast.fused", args | {"steps": steps}, values)

    def _can_become_one(self, region: _Region) -> bool:
        """Whether it can stand where its last node does, and has no results that the op could not return."""
        inside = set(region)
        taken_before = any(
            user < region[-1] and user not in inside for place in region for user in self._users_of(place)
        )
        return not taken_before and self._is_taken(self._body(region), definite=True)

    def _users_of(self, place: int) -> list[int]:
        return [user for value in self._steps[place].outputs for user in self._users.get(value.name, ())]

    def _is_taken(self, body: _Body, *, definite: bool) -> bool:
        """Whether the op takes the body. `definite`: with the results alone that no later node can take into itself."""
        if len(body.operands) > MAX_OPERANDS or len(body.values) > limits.MAX_FUSED_RESULTS:
            return False
        try:
            types = step_types(body.steps, {f"x{i}": self._types[name] for i, name in enumerate(body.operands)})
        except ShapeError:
            return False
        full = space(types.values())
        values = [value for value in body.values if not definite or self._is_wanted(value.name)]
        return all(value.type.dtype in COMPUTED and fills_rows(value.type.shape, full) for value in values)

    def _is_wanted(self, name: str) -> bool:
        """Whether something takes the value that is no candidate."""
        return name in self._outputs or any(user not in self._made.values() for user in self._users.get(name, ()))

    def _body(self, region: _Region) -> _Body:
        inside = set(region)
        operands: dict[str, str] = {}
        names: dict[str, str] = {}
        steps: list[ir.Step] = []
        returned: list[tuple[str, ir.Value]] = []
        for place in region:
            node = self._steps[place]
            assert isinstance(node, ir.Node), "a candidate"
            for name in references(node.args):
                if name not in names:
                    operands[name] = names[name] = f"x{len(operands)}"
            (value,) = node.outputs
            names[value.name] = f"s{len(steps)}"
            steps.append(ir.Step(node.op, {key: _renamed(arg, names) for key, arg in node.args.items()}))
            if value.name in self._outputs or not inside.issuperset(self._users_of(place)):
                returned.append((names[value.name], value))
        results = tuple(name for name, _ in returned)
        return _Body(tuple(operands), ir.Steps(tuple(steps), results), tuple(value for _, value in returned))


def _taken(step: ir.Node | ir.Call) -> list[str]:
    return list(references(step.args)) if isinstance(step, ir.Node) else list(step.args.values())


def _candidates(steps: Sequence[ir.Node | ir.Call], held: Collection[str]) -> list[int]:
    """The places of nodes that can be steps of a fused op, but for their shapes: no view of a cache is an operand."""
    views = set(held)
    found = []
    for place, step in enumerate(steps):
        if not isinstance(step, ir.Node):
            continue
        from_cache = not views.isdisjoint(references(step.args))
        if step.op in FUNCTIONS and step.version == 1:
            has_sizes = any(isinstance(arg, ir.Dim) for _, arg in flat(step.args))
            found += [place] if not from_cache and not has_sizes else []
        elif from_cache and step.op.startswith("aten."):
            views.update(value.name for value in step.outputs)
    return found


def _renamed(arg: ir.Arg, names: Mapping[str, str]) -> ir.Ref | ir.Const | ir.DtypeArg | ir.Items:
    assert not isinstance(arg, (ir.Dim, ir.Steps)), "a candidate"
    return ir.Ref(names[arg.name]) if isinstance(arg, ir.Ref) else arg
