"""Follows a split through a graph: from where a layer begins it to the params, caches and sums where it ends.

All functions of the graph are one system. Blocks are joined by what they share: a param that two calls bind, the slots
of a cache group. What is passed from layer to layer is whole on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from precast.builder.shard import layouts
from precast.builder.shard.layouts import Misfit, Piece, Pieces
from precast.builder.shard.rules import (
    Every,
    Gathers,
    HeadRows,
    Place,
    Relation,
    Same,
    Shares,
    Sums,
    Through,
    relations,
)
from precast.builder.weights.kept import Granule, granule, is_quantised
from precast.ir.graph.infer import references
from precast.ir.graph.schema import Block, Call, Expr, Graph, Node, TensorType, Tie, Value
from precast.ir.memory import caches

Name = tuple[str, str]
"""A value: the block that it stands in, empty for `main`, and its name there."""
Spot = tuple[Name, int]
"""A dimension of a value."""


_WRITTEN = "sizes of heads and params are numbers before the model is split"


class KeptWhole(Misfit):
    """A layer can't be split, because the user wants one of its params whole; `entry` says so."""

    def __init__(self, entry: str) -> None:
        super().__init__(f'the plan file says replicate: "{entry}"')
        self.entry = entry


class Function(NamedTuple):
    """`main` or a block."""

    name: str
    steps: tuple[Node | Call, ...]
    types: dict[str, TensorType]
    given: dict[str, str]
    """What it takes, by name: input, param, constant or cache."""
    returned: tuple[str, ...]


class System:
    """A graph as relations between dimensions; `pieces` says what is split so far."""

    def __init__(self, graph: Graph, whole: Mapping[str, str] | None = None, *, in_blocks: bool = True) -> None:
        """`whole`: params that the user wants whole, by name, with the entry that says so. `in_blocks`: whether what is
        stored in few bits is to be split where its blocks end."""
        self.graph = graph
        self._params = {param.name: param for param in graph.params if in_blocks and is_quantised(param.recipe)}
        self.functions = {"": _main(graph), **{block.name: _block(block) for block in graph.blocks}}
        self.pieces: dict[Spot, Pieces] = {}
        self.users: dict[Name, list[tuple[str, int]]] = {}
        self._relations: dict[Name, list[tuple[str, Relation]]] = {}
        self._joined: dict[Name, list[Name]] = {}
        for function in self.functions.values():
            self._add_function(function)
        for step in graph.main:
            if isinstance(step, Call):
                self._add_call(step)
        for one, other in _shared_memory(graph):
            self._join(("", one), ("", other))
        self.whole: dict[Name, str] = {}
        for param, entry in (whole or {}).items():
            self._keep_whole(("", param), entry)

    def type_of(self, name: Name) -> TensorType:
        """The type of a value over all ranks."""
        return self.functions[name[0]].types[name[1]]

    def dims(self, name: Name) -> dict[int, Pieces]:
        """How the dimensions of a value are split."""
        rank = len(self.type_of(name).shape)
        return {dim: found for dim in range(rank) if (found := self.pieces.get((name, dim)))}

    def kind(self, name: Name) -> str | None:
        """As what a function takes the value; None: it makes it."""
        return self.functions[name[0]].given.get(name[1])

    def is_constant(self, name: Name) -> bool:
        """Whether all ranks have the value whole, and each takes its part of it: a constant of the bundle, which has no
        recipe, what a call binds to one, or what a layer is given that counts no tokens."""
        if self.kind(name) == "input":
            return name[0] != "" and all(isinstance(size, int) for size in self.type_of(name).shape)
        return self.kind(name) == "constant" or any(self.kind(other) == "constant" for other in self.joined(name))

    def joined(self, name: Name) -> list[Name]:
        """The values of other functions, or of other names, that are the same tensor or of the same spec."""
        return self._joined.get(name, [])

    def granule(self, spot: Spot, piece: Piece) -> Granule:
        """How many units of `piece` are stored together, in the params that are split along with this one."""
        if not self._params:
            return Granule(1, 1)
        before = dict(self.pieces)
        try:
            touched = self.follow([(spot, piece)], through_norms=True)
            found = [
                _units_of(granule(param.recipe, param.type.dtype, dim), each.inner)
                for scope, name in touched
                if scope == "" and (param := self._params.get(name)) is not None
                for dim, pieces in self.dims((scope, name)).items()
                for each in pieces
                if each.units.seed == piece.units.seed
            ]
        except Misfit:
            found = []
        finally:
            self.pieces = before
        return Granule(math.lcm(*(each.block for each in found)), math.lcm(*(each.least for each in found)))

    def follow(self, spots: Iterable[tuple[Spot, Piece]], *, through_norms: bool) -> list[Name]:
        """Split these, and all that belongs to them; the values that are split anew.

        `through_norms`: norms may gather what they need all of. Raises Misfit; what was split by then stays so, and
        the caller goes back to what was before.
        """
        touched: dict[Name, None] = {}
        waiting = list(spots)
        while waiting:
            spot, piece = waiting.pop()
            before = self.pieces.get(spot, ())
            after = layouts.with_piece(before, piece)
            if after == before:
                continue
            self.pieces[spot] = after
            name, dim = spot
            touched[name] = None
            if name in self.whole:
                raise KeptWhole(self.whole[name])
            if self.kind(name) == "input" and not self.is_constant(name):
                raise Misfit("what it would split comes from outside of the layer, where all ranks have it")
            waiting += [((other, dim), piece) for other in self.joined(name)]
            for function, relation in self._relations.get(name, ()):
                found = self._through(function, relation, name[1], dim, piece, through_norms=through_norms)
                waiting += [(((function, place[0]), place[1]), each) for place, each in found]
        return list(touched)

    def _through(
        self, function: str, relation: Relation, name: str, dim: int, piece: Piece, *, through_norms: bool
    ) -> Iterator[tuple[Place, Piece]]:
        types = self.functions[function].types
        here = (name, dim)
        if isinstance(relation, Every):
            if here == relation.whole:
                yield relation.part, _quotient(piece, relation.step)
            if here == relation.part:
                yield relation.whole, _scaled(piece, relation.step)
        elif isinstance(relation, Same):
            yield from _same(relation, types, here, piece)
        elif isinstance(relation, Through):
            for source, target in ((relation.before, relation.after), (relation.after, relation.before)):
                if source == name:
                    pieces = self.pieces[(function, name), dim]
                    found = layouts.reshaped(pieces, dim, types[source].shape, types[target].shape)
                    yield from (((target, place), each) for place, parts in found.items() for each in parts)
        elif isinstance(relation, Sums):
            if here in relation.places:
                yield from ((place, piece) for place in relation.places if place != here)
        elif isinstance(relation, Gathers):
            if through_norms and here in relation:
                yield from ((place, piece) for place in relation if place != here)
        elif isinstance(relation, Shares):
            yield from _shared(relation, types, here, piece)
        elif isinstance(relation, HeadRows):
            rows, heads = (types[place[0]].shape[place[1]] for place in relation)
            assert isinstance(rows, int), _WRITTEN
            assert isinstance(heads, int), _WRITTEN
            if here == relation.heads:
                yield relation.rows, _scaled(piece, rows // heads)

    def _add_function(self, function: Function) -> None:
        for index, step in enumerate(function.steps):
            named = {value.name for value in step.outputs} | set(_read(step))
            for name in named:
                self.users.setdefault((function.name, name), []).append((function.name, index))
            if isinstance(step, Node):
                for relation in relations(step, function.types):
                    for name in _names(relation):
                        self._relations.setdefault((function.name, name), []).append((function.name, relation))

    def _add_call(self, call: Call) -> None:
        given = self.functions[call.block].given
        for formal, actual in call.args.items():
            if given[formal] != "input":
                self._join((call.block, formal), ("", actual))

    def _keep_whole(self, name: Name, entry: str) -> None:
        if name not in self.whole:
            self.whole[name] = entry
            for other in self.joined(name):
                self._keep_whole(other, entry)

    def _join(self, one: Name, other: Name) -> None:
        for first, second in ((one, other), (other, one)):
            others = self._joined.setdefault(first, [])
            if second not in others:
                others.append(second)


def _units_of(found: Granule, inner: Expr) -> Granule:
    """The same in units of so many elements."""
    size = inner if isinstance(inner, int) else 1
    return Granule(*(each // math.gcd(each, size) for each in found))


def _same(relation: Same, types: dict[str, TensorType], here: Place, piece: Piece) -> Iterator[tuple[Place, Piece]]:
    size = types[relation.part[0]].shape[relation.part[1]]
    if here == relation.whole:
        yield from ((relation.part, each) for each in layouts.cut((piece,), relation.start, size))
    if here == relation.part:
        yield relation.whole, piece._replace(start=piece.start + relation.start)


def _shared(relation: Shares, types: dict[str, TensorType], here: Place, piece: Piece) -> Iterator[tuple[Place, Piece]]:
    """Heads that share others: as many parts as there are of the fewer, or, where those may be held twice, of all."""
    many, few = (types[place[0]].shape[place[1]] for place in relation)
    assert isinstance(many, int), _WRITTEN
    assert isinstance(few, int), _WRITTEN
    units, ratio = piece.units, many // few
    if few == 1:
        return  # each rank has the one head that all share
    if piece.start != 0 or units.finest not in (many, few):
        raise Misfit(f"{many} heads over {few} would have to be split into {units.finest}")
    wanted = (many, 1) if units.finest == many else (few, ratio)
    if here == relation.many:
        if (units.count, piece.inner) != wanted:
            raise Misfit(f"{many} heads over {few} would have to be split into {units.count}")
        yield relation.few, Piece(0, units._replace(count=few), 1)
    if here == relation.few and many != few:
        if (units.count, piece.inner) != (few, 1):
            raise Misfit(f"{few} heads would have to be split into {units.count}")
        yield relation.many, Piece(0, units._replace(count=wanted[0]), wanted[1])
    elif here == relation.few:
        yield relation.many, piece


def _scaled(piece: Piece, by: int) -> Piece:
    inner = piece.inner
    assert isinstance(inner, int), "heads are counted"
    return Piece(piece.start * by, piece.units, inner * by)


def _quotient(piece: Piece, by: int) -> Piece:
    if not isinstance(piece.inner, int) or piece.inner % by or piece.start % by:
        raise Misfit(f"a slice takes every {by}th element of units of {piece.inner}")
    return Piece(piece.start // by, piece.units, piece.inner // by)


def _names(relation: Relation) -> set[str]:
    if isinstance(relation, Through):
        return {relation.before, relation.after}
    if isinstance(relation, Sums):
        return {name for name, _ in relation.places}
    if isinstance(relation, (Same, Every)):
        return {relation.whole[0], relation.part[0]}
    return {place[0] for place in relation}


def _read(step: Node | Call) -> Iterator[str]:
    return references(step.args) if isinstance(step, Node) else iter(step.args.values())


def _shared_memory(graph: Graph) -> Iterator[tuple[str, str]]:
    """Params that are one, and cache tensors that have one spec."""
    for param in graph.params:
        if isinstance(param.recipe, Tie):
            yield param.name, param.recipe.param
    for group in caches.groups(graph.caches):
        first, *others = group.slots
        for other in others:
            yield from ((a.name, b.name) for a, b in zip(first.tensors, other.tensors, strict=True))


def _main(graph: Graph) -> Function:
    held = tuple(caches.tensors(graph.caches))
    params = tuple(Value(param.name, param.type) for param in graph.params)
    kinds = {"input": graph.inputs, "param": params, "constant": graph.constants, "cache": held}
    return _function("", graph.main, kinds, tuple(graph.outputs.values()))


def _block(block: Block) -> Function:
    kinds = {"input": block.inputs, "param": block.params, "cache": block.caches}
    return _function(block.name, block.nodes, kinds, block.outputs)


def _function(
    name: str, steps: tuple[Node | Call, ...], kinds: dict[str, tuple[Value, ...]], returned: tuple[str, ...]
) -> Function:
    given = {value.name: kind for kind, values in kinds.items() for value in values}
    types = {value.name: value.type for values in kinds.values() for value in values}
    types |= {value.name: value.type for step in steps for value in step.outputs}
    return Function(name, steps, types, given, returned)


def whole(size: Expr, units: layouts.Units) -> Piece:
    """All of a dimension as one piece of these units."""
    assert isinstance(size, int), _WRITTEN
    assert size % units.count == 0, "units divide the dimension"
    return Piece(0, units, size // units.count)
