"""A load by several ranks, each a process with torch: rank 0 starts the others, or a launcher has started all."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from precast.ir.artifact import Bundle
from precast.ir.bundle.trust import MadeHere, folder_of_layers
from precast.ir.errors import PrecastError, RequestError, TargetError
from precast.kernels.measured import read_table
from precast.loader.engine.engine import Engine
from precast.loader.options import Backend, Capture, LoadOptions
from precast.loader.placement import check_world, place
from precast.loader.timeline import Timeline
from precast.loader.world.agree import Loaded
from precast.loader.world.follower import Ended, Follower
from precast.loader.world.lead import Lead
from precast.loader.world.start import Launched, World, join_ranks, launched, start_ranks
from precast.loader.world.timeouts import Timeouts, timeouts_of

if TYPE_CHECKING:
    import torch

    from precast.loader.world.processes import Processes


class RankOptions(NamedTuple):
    """The arguments of `precast.load` that are about ranks."""

    tp: int | None
    ep: int
    pp: int
    dp: int
    world_port: int | None
    timeouts: Mapping[str, float] | None
    processes: Processes | None


class _Given(NamedTuple):
    """What a rank must know to load: options of `load`, as numbers and text."""

    weights: str
    max_num_seqs: int
    max_num_tokens: int
    cache_bytes: int | None
    allow_config_mismatch: bool
    choices: str | None
    capture: Capture | None
    native: list[str]
    pp: int
    dp: int
    weights_timeout: float

    @property
    def common(self) -> str:
        """Those that must be equal on all ranks; paths, waits, and what is trusted, may be others on each host."""
        return ", ".join(f"{name} {value}" for name, value in self._asdict().items() if name not in _OWN)

    def options(self, bundle: str | Bundle, device: str | torch.device | None) -> LoadOptions:
        """The same for a load. Rank 0 has asked the trust policy for all, which have the same bundle."""
        table = None if self.choices is None else read_table(Path(self.choices))
        return LoadOptions(
            bundle, self.weights, device, self.max_num_seqs, self.max_num_tokens, None, self.cache_bytes, True,
            self.allow_config_mismatch, table, self.capture, self.native, MadeHere(folder_of_layers()),
            weights_timeout=self.weights_timeout,
        )  # fmt: skip


_OWN = ("weights", "choices", "native", "weights_timeout")


def load_with_ranks(
    options: LoadOptions, ranks: RankOptions, timeline: Timeline, choices: str | Path | None, backend: Backend | None
) -> Engine | None:
    """The engine on rank 0; None where this is the only rank. See `precast.loader.load.load`.

    Raises RequestError for worlds that there can't be, TargetError (backend-unfit) where torch may not be used, and
    SystemExit on the other ranks, when all has ended.
    """
    waits, found = timeouts_of(ranks.timeouts), launched()
    check_world(1, 1, pp=ranks.pp, dp=ranks.dp)
    tp = ranks.tp
    if tp is None:
        tp = 1 if found is None else found.num_ranks // ranks.pp or 1
    check_world(tp, ranks.ep, pp=ranks.pp)
    if tp * ranks.pp == 1 == ranks.dp:
        return None
    if backend == "driver":
        fix = "load it with backend='torch', or leave the choice to Precast"
        raise TargetError("backend-unfit", "the driver backend doesn't run models that ranks share", fix=fix)
    ranks = ranks._replace(tp=tp)
    opened = options.bundle if isinstance(options.bundle, Bundle) else Bundle.open(options.bundle)
    check_world(tp, ranks.ep, opened.graph, pp=ranks.pp, dp=ranks.dp)
    options = options._replace(bundle=opened, trust=options.rules(opened))
    given = _Given(
        str(options.weights), options.max_num_seqs, options.max_num_tokens, options.cache_bytes,
        options.allow_config_mismatch, None if choices is None else str(choices), options.capture,
        list(options.native), ranks.pp, ranks.dp, options.weights_timeout,
    )  # fmt: skip
    with timeline.phase("ranks"):
        world = _join(opened, given, found, ranks, options.device, waits)
    local_rank = 0 if found is None else found.local_rank
    if isinstance(world.side, Follower):
        follow(world, bundle=opened, device=options.device, ep=ranks.ep, local_rank=local_rank, **given._asdict())
        raise SystemExit(0)
    engine = _load_lead(options, given, world, world.side, ranks, local_rank, timeline)
    weakref.finalize(engine, world.side.close)  # also at the end of the process
    return engine


def _join(
    bundle: Bundle, given: _Given, found: Launched | None, ranks: RankOptions, device: str | torch.device | None,
    timeouts: Timeouts,
) -> World:  # fmt: skip
    """Start the other ranks, or join those that a launcher has started."""
    assert ranks.tp is not None
    num_ranks = ranks.tp * ranks.pp
    if found is None:
        from precast.loader.world.processes import Processes

        kind = None if device is None else str(device)
        options = given._asdict() | {"bundle": str(bundle.path)}
        return start_ranks(ranks.processes or Processes(num_ranks), ranks.ep, timeouts, ranks.world_port, kind, options)
    if found.num_ranks != num_ranks:
        stages = "" if ranks.pp == 1 else f" and pp {ranks.pp}"
        message = f"tp is {ranks.tp}{stages}, and the launcher has started {found.num_ranks} processes"
        fix = f"give tp={found.num_ranks}, or none" if ranks.pp == 1 else "start tp times pp processes"
        raise RequestError("engine-option-invalid", message, fix=fix)
    return join_ranks(found, timeouts, ranks.world_port)


def _load_lead(
    options: LoadOptions, given: _Given, world: World, lead: Lead, ranks: RankOptions, local_rank: int,
    timeline: Timeline,
) -> Engine:  # fmt: skip
    """Rank 0 of several. If it fails, all of them end."""
    from precast.loader.run.rank_runner import RankRunner
    from precast.loader.torch_load import Ranks, capture_before, engine_of, load_rank

    tp, ep, pp, dp = lead.num_ranks // ranks.pp, ranks.ep, ranks.pp, ranks.dp
    try:
        loaded = load_rank(
            options, lambda: place(options.device, tp=tp, ep=ep, pp=pp, dp=dp, local_rank=local_rank), timeline,
            Ranks(world, given.common),
        )  # fmt: skip
        timelines = lead.gather("loaded", Loaded(timeline.to_json().encode()))
        timeline.ranks = {rank: msgspec.json.decode(each.timeline) for rank, each in enumerate(timelines) if rank}
        assert isinstance(loaded.runner, RankRunner)
        loaded.runner.at_close(lead.close)
        if options.capture == "before":
            capture_before(loaded.runner, timeline)
    except BaseException as error:
        lead.fail(error)
        lead.close()
        raise
    return engine_of(loaded, options, timeline)


def follow(
    world: World, *, bundle: str | Bundle, device: str | torch.device | None, ep: int, local_rank: int, **options: Any
) -> None:
    """Be a follower: load as rank 0 does, and do what it orders until it ends the world.

    Raises the failure that has ended it, of this rank or of another, as all ranks do.
    """
    from precast.loader.run.rank_runner import RankRunner
    from precast.loader.torch_load import Ranks, load_rank

    side, timeline = world.side, Timeline()
    assert isinstance(side, Follower)
    try:
        given = _Given(**options)
        tp, pp, dp = side.num_ranks // given.pp, given.pp, given.dp
        loaded = load_rank(
            given.options(bundle, device),
            lambda: place(device, rank=side.rank, tp=tp, ep=ep, pp=pp, dp=dp, local_rank=local_rank), timeline,
            Ranks(world, given.common),
        )  # fmt: skip
        side.gather("loaded", Loaded(timeline.to_json().encode()))
        runner = loaded.runner
        assert isinstance(runner, RankRunner)
        for raw in side.orders(spins=runner.device.kind == "cuda"):
            runner.obey(*runner.decode(raw))
    except Ended:
        pass
    except Exception as error:
        if not isinstance(error, PrecastError):  # what ends a rank also ends the others' collectives: who was first?
            side.wait_for_reason()
        side.fail(error)
        side.check()
        raise
    finally:
        side.close()
