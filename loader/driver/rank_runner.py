"""The steps of one of several ranks without torch: see `precast.loader.run.rank_steps`."""

from __future__ import annotations

from precast.loader.driver.runner import DriverRunner
from precast.loader.run.rank_steps import RankSteps


class DriverRankRunner(RankSteps, DriverRunner):
    """A `DriverRunner` of one rank."""
