"""A graph in one world, as one rank of it: symbols of the world have their values.

Nothing here asks whether the world is one that the graph is split for: `refusal` says that.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from precast.ir.graph import symbols
from precast.ir.graph.alone import without_collectives
from precast.ir.graph.plain import plain
from precast.ir.graph.schema import Expr, Graph, ShardPlan
from precast.ir.memory import caches

UNSHARDED: Mapping[str, int] = types.MappingProxyType({"rank": 0, "tp": 1, "ep": 1})
"""The one rank of one."""


def bound(graph: Graph, world: Mapping[str, int]) -> Graph:
    """The graph of the rank `world["rank"]` of `tp` and `ep`, its sizes in normal form. No shard plan is left.

    Where no ranks share a layer, its collectives are gone, too. A graph without symbols of the world is returned as it
    is. The result is not verified: a division by zero, which has no normal form, stays where it stands.
    """
    values = {each.name: world[each.name] for each in graph.symbols if each.name in world}
    if not values:
        return graph
    others = tuple(each for each in graph.symbols if each.name not in values)
    made: Graph = msgspec.structs.replace(_bound(graph, Graph, values), symbols=others, shards=ShardPlan())
    if world["tp"] == 1:
        made = without_collectives(made)
    else:
        made = msgspec.structs.replace(made, caches=caches.without_slabs(made.caches))
    return plain(made)


def unsharded(graph: Graph) -> Graph:
    """The graph of one rank alone."""
    return bound(graph, UNSHARDED)


def refusal(plan: ShardPlan, tp: int, ep: int) -> str | None:
    """Why a graph with this plan is not split over `tp` ranks and `ep` parts of the experts; None: it is."""
    worlds = {world.tp: world.ep for world in plan.worlds} or {1: (1,)}
    if tp not in worlds:
        return f"tp is {tp}, and the bundle can be split over {', '.join(map(str, worlds))} ranks"
    if ep not in worlds[tp]:
        return f"ep is {ep}, and over {tp} ranks the experts can be split into {', '.join(map(str, worlds[tp]))} parts"
    return None


def _bound(value: Any, kind: Any, world: Mapping[str, int]) -> Any:
    """`value`, of the type `kind` of the schema, with the world's values in each of its expressions."""
    if kind == Expr:
        return value if isinstance(value, int) else symbols.substitute(value, world)
    if isinstance(value, msgspec.Struct):
        kinds = _fields_with_sizes(type(value))
        if not kinds:
            return value
        changes = {name: _bound(getattr(value, name), each, world) for name, each in kinds.items()}
        return msgspec.structs.replace(value, **changes)
    if isinstance(value, tuple):
        item = typing.get_args(kind)[0]
        return tuple([_bound(each, item, world) for each in value])
    if isinstance(value, dict):
        item = typing.get_args(kind)[1]
        return {key: _bound(each, item, world) for key, each in value.items()}
    return value


@cache
def _fields_with_sizes(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """The fields of a struct that may hold expressions, with their types."""
    return {name: kind for name, kind in typing.get_type_hints(struct).items() if _may_hold(kind, frozenset((struct,)))}


def _may_hold(kind: Any, above: frozenset[Any]) -> bool:
    """Whether a value of this type can hold an expression; a type that stands in itself is asked once."""
    if kind == Expr:
        return True
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = () if kind in above else typing.get_type_hints(kind).values()
        return any(_may_hold(each, above | {kind}) for each in hints)
    return any(_may_hold(each, above) for each in typing.get_args(kind))
