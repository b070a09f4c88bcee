"""The steps of one of several ranks, computed with torch: see `precast.loader.run.rank_steps`."""

from __future__ import annotations

from typing import Any

from precast.ir.graph.schema import Graph
from precast.loader.cache.memory import CacheMemory
from precast.loader.device import Device
from precast.loader.program.restore import Program
from precast.loader.run.rank_steps import RankSteps
from precast.loader.run.runner import Runner
from precast.loader.sizing import EngineLimits
from precast.loader.world.follower import Follower
from precast.loader.world.lead import Lead


class RankRunner(RankSteps, Runner):
    """A `Runner` of one rank."""

    def __init__(
        self, program: Program, graph: Graph, memory: CacheMemory, device: Device, limits: EngineLimits,
        world: Lead | Follower, **more: Any,
    ) -> None:  # fmt: skip
        """`more`: as `Runner`."""
        super().__init__(program, graph, memory, device, limits, **more)
        self.join(world)
