"""A graph in one world, as one rank of it: symbols of the world have their values.

Nothing here asks whether the world is one that the graph is split for: `refusal` says that.
"""

from __future__ import annotations

import types
from collections.abc import Mapping

import msgspec

from precast.ir.graph.alone import without_collectives
from precast.ir.graph.data_parallel import data_parallel
from precast.ir.graph.normed_sums import with_normed_sums
from precast.ir.graph.plain import plain
from precast.ir.graph.schema import Graph, ShardPlan
from precast.ir.graph.substitution import substituted
from precast.ir.memory import caches

UNSHARDED: Mapping[str, int] = types.MappingProxyType({"rank": 0, "tp": 1, "ep": 1})
"""The one rank of one."""


def bound(graph: Graph, world: Mapping[str, int], *, dp: int = 1) -> Graph:
    """The graph of the rank `world["rank"]` of `tp` and `ep`, its sizes in normal form. No shard plan is left.

    Where no ranks share a layer, its collectives are gone, too; where they do, a sum over them and the norm after it
    are one node. With `dp` as many as `tp`, each rank has sequences of its own (`data_parallel`). A graph without
    symbols of the world is returned as it is. The result is not verified: a division by zero, which has no normal form,
    stays where it stands.

    Raises DataParallelError where ranks can't have sequences of their own.
    """
    values = {each.name: world[each.name] for each in graph.symbols if each.name in world}
    if not values:
        return graph
    if dp > 1:
        return plain(data_parallel(graph, values))
    others = tuple(each for each in graph.symbols if each.name not in values)
    made: Graph = msgspec.structs.replace(substituted(graph, Graph, values), symbols=others, shards=ShardPlan())
    if world["tp"] == 1:
        made = without_collectives(made)
    else:
        made = msgspec.structs.replace(with_normed_sums(made), caches=caches.without_slabs(made.caches))
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
