"""Where a load puts the model: which rank of which world, on which device; and a graph with that world's sizes.

Made once, first; all that follows is told. Nothing else knows the symbols of the world.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from precast.ir.errors import RequestError, shown_value
from precast.ir.graph.schema import Graph
from precast.ir.graph.world import bound, refusal
from precast.ir.verify import verifier
from precast.loader.device import Device

if TYPE_CHECKING:
    import torch

MAX_RANKS = 1024
"""Ranks that share each layer: far more than any machine connects closely enough for that."""


class Placement(NamedTuple):
    """Rank `rank` of `tp` that share each layer, and of `ep` that share the experts; on `device`."""

    rank: int
    tp: int
    ep: int
    device: Device

    @property
    def world(self) -> dict[str, int]:
        """The values of the symbols of the world."""
        return {"rank": self.rank, "tp": self.tp, "ep": self.ep}


def check_world(tp: object, ep: object, graph: Graph | None = None) -> None:
    """Raise RequestError for numbers of ranks that are none, or that the graph doesn't take: with those that fit."""
    for name, count in (("tp", tp), ("ep", ep)):
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_RANKS:
            found = f"{name} is {shown_value(count)}, expected an integer of 1 to {MAX_RANKS}"
            raise RequestError("engine-option-invalid", found)
    assert isinstance(tp, int)  # both are: the loop has looked
    assert isinstance(ep, int)
    if graph is not None:
        _check_plan(graph, tp, ep)
    if tp % ep:
        found = f"ep is {ep}, and tp is {tp}: experts are split over the ranks that share a layer"
        raise RequestError("engine-option-invalid", found, fix="give an ep that divides tp")


def _check_plan(graph: Graph, tp: int, ep: int) -> None:
    why = refusal(graph.shards, tp, ep)
    if why is not None:
        raise RequestError("engine-option-invalid", why, fix="start as many ranks as the bundle can be split over")


def place(
    device: str | torch.device | None, *, rank: int = 0, tp: int = 1, ep: int = 1, local_rank: int | None = None
) -> Placement:
    """The placement of a rank on a device that is opened for it; None: a GPU if there is one.

    Where ranks share the model, each takes the GPU of its number on its host, `local_rank`; None: `rank`.

    Raises what `torch_device.open_device` raises, and RequestError for a rank or numbers of ranks that are none.
    """
    check_world(tp, ep)
    if not isinstance(rank, int) or not 0 <= rank < tp:
        raise RequestError("engine-option-invalid", f"rank is {shown_value(rank)}, expected 0 to {tp - 1}")
    from precast.loader.torch_device import open_device, open_gpu  # the backend is chosen before it is imported

    if tp == 1:
        return Placement(rank, tp, ep, open_device(device))
    return Placement(rank, tp, ep, open_gpu(device, rank if local_rank is None else local_rank))


def bind_world(graph: Graph, placement: Placement) -> Graph:
    """The graph of this rank: the symbols of the world have their values, in normal form, and are gone.

    Where no ranks share a layer, its collectives are gone too. A graph without such symbols is returned as it is.

    Raises RequestError for a world that the graph's plan doesn't have, and BundleError (graph-invalid) for a graph that
    makes no sense with these values.
    """
    world = {each.name: placement.world[each.name] for each in graph.symbols if each.name in placement.world}
    if not world:
        return graph
    _check_plan(graph, placement.tp, placement.ep)
    for symbol in graph.symbols:
        size = world.get(symbol.name)
        if size is not None and (size < symbol.min or (symbol.max is not None and size > symbol.max)):
            allowed = f"{symbol.min} to {'any' if symbol.max is None else symbol.max}"
            found = f"{symbol.name} is {size}, and the bundle allows {allowed}"
            raise RequestError("engine-option-invalid", found)
    made = bound(graph, placement.world)
    verifier.check(made)
    return made
