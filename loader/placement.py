"""Where a load puts the model: which rank of which world, on which device; and a graph with that world's sizes.

Made once, first; all that follows is told. Nothing else knows the symbols of the world.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from precast.ir.errors import RequestError
from precast.ir.graph.schema import Graph
from precast.ir.graph.world import bound, refusal
from precast.ir.verify import verifier
from precast.loader.device import Device

if TYPE_CHECKING:
    import torch


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


def place(device: str | torch.device | None, *, rank: int = 0, tp: int = 1, ep: int = 1) -> Placement:
    """The placement on a device that is opened for it; None: a GPU if there is one.

    Raises what `torch_device.open_device` raises, and RequestError for more ranks than one.
    """
    if (rank, tp, ep) != (0, 1, 1):
        found = (
            f"rank is {rank}, tp is {tp}, ep is {ep}, and this release runs a model on one device: rank 0, tp 1, ep 1"
        )
        raise RequestError("engine-option-invalid", found)
    from precast.loader.torch_device import open_device  # the backend is chosen before it is imported

    return Placement(rank, tp, ep, open_device(device))


def bind_world(graph: Graph, placement: Placement) -> Graph:
    """The graph of this rank: the symbols of the world have their values, in normal form, and are gone.

    Where no ranks share a layer, its collectives are gone too. A graph without such symbols is returned as it is.

    Raises RequestError for a world outside the symbols' ranges, and BundleError (graph-invalid) for a graph that makes
    no sense with these values.
    """
    world = {each.name: placement.world[each.name] for each in graph.symbols if each.name in placement.world}
    if not world:
        return graph
    refused = refusal(graph.shards, placement.tp, placement.ep) if graph.shards.worlds else None
    if refused is not None:
        raise RequestError("engine-option-invalid", refused, fix="start as many ranks as the bundle can be split over")
    for symbol in graph.symbols:
        size = world.get(symbol.name)
        if size is not None and (size < symbol.min or (symbol.max is not None and size > symbol.max)):
            allowed = f"{symbol.min} to {'any' if symbol.max is None else symbol.max}"
            found = f"{symbol.name} is {size}, and the bundle allows {allowed}"
            raise RequestError("engine-option-invalid", found)
    made = bound(graph, placement.world)
    verifier.check(made)
    return made
