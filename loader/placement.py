"""Where a load puts the model: which rank of which world, on which device; and a graph with that world's sizes.

Made once, first; all that follows is told. Nothing else knows the symbols of the world.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from precast.ir.errors import RequestError, shown_value
from precast.ir.graph import data_parallel, stages
from precast.ir.graph.schema import Graph, ShardPlan
from precast.ir.graph.world import bound, refusal
from precast.ir.memory import caches
from precast.ir.verify import verifier
from precast.loader.device import Device

if TYPE_CHECKING:
    import torch

MAX_RANKS = 1024
"""Ranks that share each layer: far more than any machine connects closely enough for that."""


class Placement(NamedTuple):
    """Rank `rank` of `tp` that share each layer, and of `ep` that share the experts; on `device`. The layers are those
    of stage `stage` of `pp`. With `dp` as many as `tp`, each rank has sequences of its own; else it is 1."""

    rank: int
    tp: int
    ep: int
    device: Device
    stage: int = 0
    pp: int = 1
    dp: int = 1

    @property
    def world(self) -> dict[str, int]:
        """The values of the symbols of the world."""
        return {"rank": self.rank, "tp": self.tp, "ep": self.ep}


def check_world(tp: object, ep: object, graph: Graph | None = None, *, pp: object = 1, dp: object = 1) -> None:
    """Raise RequestError for numbers of ranks that are none, or that the graph doesn't take: with those that fit."""
    for name, count in (("tp", tp), ("ep", ep), ("pp", pp), ("dp", dp)):
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_RANKS:
            found = f"{name} is {shown_value(count)}, expected an integer of 1 to {MAX_RANKS}"
            raise RequestError("engine-option-invalid", found)
    assert isinstance(tp, int)  # both are: the loop has looked
    assert isinstance(ep, int)
    assert isinstance(pp, int)
    assert isinstance(dp, int)
    if graph is not None:
        _check_plan(graph, tp, ep, pp)
        _check_sequences(graph, tp, pp, dp)
    if tp % ep:
        found = f"ep is {ep}, and tp is {tp}: experts are split over the ranks that share a layer"
        raise RequestError("engine-option-invalid", found, fix="give an ep that divides tp")


def _check_plan(graph: Graph, tp: int, ep: int, pp: int) -> None:
    why = refusal(graph.shards, tp, ep) or stages.refusal(graph.shards, pp, stages.num_layers(graph))
    if why is not None:
        raise RequestError("engine-option-invalid", why, fix="start as many ranks as the bundle can be split over")


def _check_sequences(graph: Graph, tp: int, pp: int, dp: int) -> None:
    why = data_parallel.refusal(graph, dp, tp)
    if why is None and dp > 1 and pp > 1:
        why = f"dp is {dp}, and pp is {pp}: stages share all sequences; give dp 1, or pp 1"
    if why is not None:
        fix = "`precast inspect --shards` shows what dp changes"
        raise RequestError("engine-option-invalid", why, fix=fix)


def place(
    device: str | torch.device | None, *, rank: int = 0, tp: int = 1, ep: int = 1, pp: int = 1,
    dp: int = 1, local_rank: int | None = None,
) -> Placement:  # fmt: skip
    """The placement of rank `rank` of all, those of the first of `pp` stages first, on a device that is opened for it;
    None: a GPU if there is one.

    Where ranks share the model, each takes the GPU of its number on its host, `local_rank`; None: `rank`.

    Raises what `torch_device.open_device` raises, and RequestError for a rank or numbers of ranks that are none.
    """
    check_world(tp, ep, pp=pp, dp=dp)
    if not isinstance(rank, int) or not 0 <= rank < tp * pp:
        raise RequestError("engine-option-invalid", f"rank is {shown_value(rank)}, expected 0 to {tp * pp - 1}")
    from precast.loader.torch_device import open_device, open_gpu  # the backend is chosen before it is imported

    if tp * pp == 1:
        return Placement(rank, tp, ep, open_device(device))
    opened = open_gpu(device, rank if local_rank is None else local_rank)
    return Placement(rank % tp, tp, ep, opened, rank // tp, pp, dp)


def bind_world(graph: Graph, placement: Placement) -> Graph:
    """The graph of this rank: the symbols of the world have their values, in normal form, and are gone. Of several
    stages it is that of this one, with slabs.

    Where no ranks share a layer, its collectives are gone too. A graph without such symbols is that of one rank.

    Raises RequestError for a world that the graph's plan doesn't have, and BundleError (graph-invalid) for a graph that
    makes no sense with these values.
    """
    made = bind_unverified(graph, placement.world, placement.pp, placement.dp)
    if made is not graph:
        verifier.check(made)
    return _staged(graph, made, placement)


def bind_unverified(graph: Graph, world: Mapping[str, int], pp: int = 1, dp: int = 1) -> Graph:
    """As `bind_world`, of all layers, for who verifies it later (`precast.ir.verify.verifier.check`).

    `world` has `rank`, `tp` and `ep`. Raises RequestError.
    """
    values = {each.name: world[each.name] for each in graph.symbols if each.name in world}
    if not values:
        return graph
    _check_plan(graph, world["tp"], world["ep"], pp)
    for symbol in graph.symbols:
        size = values.get(symbol.name)
        if size is not None and (size < symbol.min or (symbol.max is not None and size > symbol.max)):
            allowed = f"{symbol.min} to {'any' if symbol.max is None else symbol.max}"
            found = f"{symbol.name} is {size}, and the bundle allows {allowed}"
            raise RequestError("engine-option-invalid", found)
    _check_sequences(graph, world["tp"], pp, dp)
    return bound(graph, world, dp=dp)


def _staged(graph: Graph, made: Graph, placement: Placement) -> Graph:
    """The placement's stage of what was made of a graph. Slabs are those of all layers, so that stages agree."""
    if placement.pp == 1:
        return made
    _check_plan(graph, placement.tp, placement.ep, placement.pp)
    made = msgspec.structs.replace(made, caches=caches.with_slabs(made.caches), shards=ShardPlan())
    return stages.stage_graph(made, stages.pipeline(graph.shards, placement.pp).layers, placement.stage)
