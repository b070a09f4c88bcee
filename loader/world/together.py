"""What ranks make of what each of them has found, whatever runs the model: the native layer, the size of the cache."""

from __future__ import annotations

from collections.abc import Callable

from precast.ir.errors import PrecastError
from precast.loader.native import Chosen
from precast.loader.sizing import ArenaSize, EngineLimits
from precast.loader.world.agree import Sized, Verdict, slabs_of_all, why_no_layer
from precast.loader.world.follower import Follower
from precast.loader.world.lead import Lead
from precast.loader.world.messages import Failed


def agreed(side: Lead | Follower, chosen: Chosen, *, rules: str) -> Chosen:
    """What this rank has chosen, if all ranks have chosen it, by the same `rules`; else none, and the note says which
    rank differs, and why. All ranks call it, before any kernel is loaded."""
    mine = Verdict(chosen.digest, chosen.layer is not None, chosen.note, rules)
    why = why_no_layer(side.gather("native", mine))
    return Chosen(None, f"kernels are compiled here: {why}", chosen.digest) if why else chosen


def size_of_all(side: Lead | Follower, sized: Callable[[EngineLimits], ArenaSize], limits: EngineLimits) -> ArenaSize:
    """The cache that all ranks have room for; `sized` says how large this one's can be.

    Raises, on all ranks, the error of one that has too little, with the arithmetic of each.
    """
    size: ArenaSize | None = None
    try:
        size = sized(limits)
        mine = Sized(size.num_slabs, size.counters())
    except PrecastError as error:
        mine = Sized(0, {}, Failed.of(error, side.rank))
    num_slabs = slabs_of_all(side.gather("pools", mine, timeout="load"))
    assert size is not None, "a rank that has failed raises its error"
    return sized(limits._replace(cache_bytes=num_slabs * size.slab_bytes))
