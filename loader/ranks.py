"""A load by several ranks, each a process: rank 0 starts the others, or a launcher has started all. No torch yet."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from precast.ir.artifact import Bundle
from precast.ir.errors import PrecastError, RequestError, TargetError
from precast.kernels.collectives.launches import Among
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

    from precast.loader.run.rank_steps import RankSteps
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
    trust: str | None
    repository: str | None
    pp: int
    dp: int
    weights_timeout: float
    backend: Backend

    @property
    def common(self) -> str:
        """Those that must be equal on all ranks; paths, waits, and what is trusted, may be others on each host."""
        return ", ".join(f"{name} {value}" for name, value in self._asdict().items() if name not in _OWN)

    def options(self, bundle: str | Bundle, device: str | torch.device | None) -> LoadOptions:
        """The same for a load. Each rank asks the trust policy by itself."""
        table = None if self.choices is None else read_table(Path(self.choices))
        return LoadOptions(
            bundle, self.weights, device, self.max_num_seqs, self.max_num_tokens, None, self.cache_bytes, True,
            self.allow_config_mismatch, table, self.capture, self.native, self.trust, self.repository,
            self.weights_timeout,
        )  # fmt: skip


_OWN = ("weights", "choices", "native", "trust", "repository", "weights_timeout")


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
        _check_driver(found, ranks)
    ranks = ranks._replace(tp=tp)
    opened = options.bundle if isinstance(options.bundle, Bundle) else Bundle.open(options.bundle)
    check_world(tp, ranks.ep, opened.graph, pp=ranks.pp, dp=ranks.dp)
    options = options._replace(bundle=opened)
    options.rules(opened)  # a bundle that is kept out is refused before anything is started
    given = _Given(
        str(options.weights), options.max_num_seqs, options.max_num_tokens, options.cache_bytes,
        options.allow_config_mismatch, None if choices is None else str(choices), options.capture,
        list(options.native), str(options.trust) if isinstance(options.trust, (str, os.PathLike)) else None,
        options.repository, ranks.pp, ranks.dp, options.weights_timeout, backend or "torch",
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


def _check_driver(found: Launched | None, ranks: RankOptions) -> None:
    """Raise TargetError (backend-unfit) for worlds that have to have torch."""
    why = ""
    if ranks.pp > 1:
        why = "stages send each other what they have by torch"
    elif ranks.dp > 1:
        why = "ranks that have sequences of their own have torch"
    elif found is not None:
        why = "ranks that a launcher has started meet at its rendezvous, which is torch's"
    if why:
        fix = "load it with backend='torch', or leave the choice to Precast"
        raise TargetError("backend-unfit", f"the driver backend doesn't run the model: {why}", fix=fix)


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
    try:
        loaded = _load_rank(options, given, world, ranks.ep, local_rank, timeline)
        timelines = lead.gather("loaded", Loaded(timeline.to_json().encode()))
        timeline.ranks = {rank: msgspec.json.decode(each.timeline) for rank, each in enumerate(timelines) if rank}
        loaded.runner.at_close(lead.close)
        if options.capture == "before":
            loaded.capture_before(timeline)
    except BaseException as error:
        lead.fail(error)
        lead.close()
        raise
    return loaded.engine(timeline)


class _Rank(NamedTuple):
    """What a rank runs, and what makes rank 0's of it, by whatever backend."""

    runner: RankSteps
    capture_before: Callable[[Timeline], None]
    engine: Callable[[Timeline], Engine]


def _load_rank(
    options: LoadOptions, given: _Given, world: World, ep: int, local_rank: int, timeline: Timeline
) -> _Rank:
    """Everything up to the first step, of this rank."""
    if given.backend == "driver":
        return _load_rank_with_driver(options, given, world, ep, local_rank, timeline)
    from precast.loader import torch_load
    from precast.loader.run.rank_runner import RankRunner

    side, pp = world.side, given.pp
    loaded = torch_load.load_rank(
        options,
        lambda: place(
            options.device, rank=side.rank, tp=side.num_ranks // pp, ep=ep, pp=pp, dp=given.dp, local_rank=local_rank
        ), timeline, torch_load.Ranks(world, given.common),
    )  # fmt: skip
    runner = loaded.runner
    assert isinstance(runner, RankRunner)
    return _Rank(
        runner, partial(torch_load.capture_before, runner),
        lambda timeline: torch_load.engine_of(loaded, options, timeline),
    )  # fmt: skip


def _load_rank_with_driver(
    options: LoadOptions, given: _Given, world: World, ep: int, local_rank: int, timeline: Timeline
) -> _Rank:
    """As `_load_rank`, by the CUDA driver alone. Raises TargetError (backend-unfit) for what it doesn't run."""
    from precast.loader.driver import rank_load, ready
    from precast.loader.driver.context import begin
    from precast.loader.driver.unfit import UnfitError

    if options.device is not None and str(options.device) != "cuda":
        found = f"device is {str(options.device)!r}, and each rank takes a GPU of its own"
        raise RequestError("engine-option-invalid", found, fix="give 'cuda'; CUDA_VISIBLE_DEVICES says which")
    side, context = world.side, begin(f"cuda:{local_rank}")
    among, folder = Among(side.rank, side.num_ranks), Path(world.meeting.file).parent
    try:
        ranks = rank_load.Ranks(side, among, ep, folder, given.common)
        opened, runner = rank_load.load_rank(options, timeline, context, ranks)
    except UnfitError as error:
        fix = "load it with backend='torch', or leave the choice to Precast"
        raise TargetError("backend-unfit", f"the driver backend doesn't run the model: {error}", fix=fix) from None
    return _Rank(
        runner, partial(ready.capture_before, runner),
        lambda timeline: ready.engine_of(runner, options, timeline, opened),
    )  # fmt: skip


def follow(
    world: World, *, bundle: str | Bundle, device: str | torch.device | None, ep: int, local_rank: int, **options: Any
) -> None:
    """Be a follower: load as rank 0 does, and do what it orders until it ends the world.

    Raises the failure that has ended it, of this rank or of another, as all ranks do.
    """
    side, timeline = world.side, Timeline()
    assert isinstance(side, Follower)
    try:
        given = _Given(**options)
        runner = _load_rank(given.options(bundle, device), given, world, ep, local_rank, timeline).runner
        side.gather("loaded", Loaded(timeline.to_json().encode()))
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
