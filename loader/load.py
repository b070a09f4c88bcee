"""`precast.load`: from a bundle and a checkpoint to an engine, phase by phase."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import torch

from precast.ir.artifact import Bundle
from precast.ir.bundle.trust import Trust
from precast.ir.errors import PrecastError, RequestError, shown_value
from precast.ir.graph.schema import Graph
from precast.ir.memory import caches, liveness
from precast.ir.memory.capture import capture_plan, cut
from precast.ir.weights import config_facts
from precast.ir.weights.checkpoint import CheckpointFiles
from precast.ir.weights.tensorfile import Tensor
from precast.kernels.dtypes import BY_NAME
from precast.kernels.measured import Table, read_table
from precast.kernels.native import Native
from precast.kernels.registry import target_of
from precast.kernels.sealed import sealed_tables
from precast.kernels.use import Target
from precast.loader import sizing
from precast.loader.cache.memory import CacheMemory
from precast.loader.collector import collector_held
from precast.loader.device import Device
from precast.loader.engine.engine import Engine
from precast.loader.engine.tokenizer import check_tokenizer
from precast.loader.native import choose
from precast.loader.placement import Placement, bind_world, check_world, place
from precast.loader.program.restore import restore
from precast.loader.run.batch import BatchInputs
from precast.loader.run.runner import Runner
from precast.loader.sizing import ArenaSize, EngineLimits
from precast.loader.timeline import Timeline
from precast.loader.torch_device import cut_blocks_to_size, tensor_of
from precast.loader.weights.stream import load_weights, params_bytes
from precast.loader.weights.workers import PinnedBuffers
from precast.loader.world.agree import Loaded
from precast.loader.world.follower import Ended, Follower
from precast.loader.world.lead import Lead
from precast.loader.world.meet import meet, size_of_all
from precast.loader.world.processes import Processes
from precast.loader.world.start import Launched, World, join_ranks, launched, start_ranks
from precast.loader.world.timeouts import Timeouts, timeouts_of

Capture = Literal["background", "before", "off"]
"""When steps are captured as CUDA graphs."""


def load(
    bundle: str | Path | Bundle,
    *,
    weights: str | Path,
    device: str | torch.device | None = None,
    tp: int | None = None,
    ep: int = 1,
    max_num_seqs: int = 256,
    max_num_tokens: int = 8192,
    max_prefill_tokens: int | None = None,
    cache_bytes: int | None = None,
    reuse_prefixes: bool = True,
    allow_config_mismatch: bool = False,
    choices: str | Path | None = None,
    capture: Capture | None = None,
    native: str | Sequence[str] = (),
    trust: Trust | None = None,
    world_port: int | None = None,
    timeouts: Mapping[str, float] | None = None,
    processes: Processes | None = None,
    timeline: Timeline | None = None,
) -> Engine:
    """The engine of a bundle on `device`, with the weights of a checkpoint: a directory, or one safetensors file.

    `device`: "cpu", "cuda", "cuda:1"; None: the GPU if there is one. At most `max_num_seqs` sequences run at once, and
    a step computes at most `max_num_tokens` tokens. Where sequences decode in it, at most `max_prefill_tokens` of them
    are of prompts; None: so many that those wait little longer, by the time that steps take
    (`precast.loader.schedule.prefill_budget`). `cache_bytes` for keys, values and states; None: as many as
    `precast.loader.sizing` says. `reuse_prefixes` False: every prompt is computed from its first token.
    `capture`: steps are captured as CUDA graphs between steps once the first token is drawn (`background`), `before`
    this function returns, or not at all (`off`); None: `background` on a GPU, and `off` on a CPU, where a captured step
    is no faster.

    `choices`: a table of measured choices, as `precast bench kernels` writes it; None: the one that the bundle was
    sealed with on this machine, else the one that comes with Precast for the GPU, if there is one.

    `native`: digests, one or several, of native layers or of bundles whose native layers may be used: they are code.
    Those that `trust` admits are used too; None: those that this user compiled on this machine. Where none is used,
    kernels are compiled as they are first launched; the timeline says which it is, and why (docs/native.md). Layers are
    for one rank alone; of several, most kernels are compiled.

    `tp`: so many ranks share each layer, each a process with a GPU of its own, and `ep`, which divides `tp`, says over
    how many groups of them experts are split. This process is rank 0, and starts the others on this host; they end
    with the engine. Where a launcher such as `torchrun` has started all processes, each is its rank: on rank 0 this
    function returns the engine, on the others it raises SystemExit once that is closed. None: as many as the launcher
    has started, or 1. `world_port`: rank 0 listens there for the others; None: on a free port. `timeouts`: seconds, by
    the names of `precast.loader.world.timeouts.Timeouts`. `processes` for the other ranks, if the caller has started
    them beforehand.

    `allow_config_mismatch`: the bundle's numbers count where the checkpoint's `config.json` says others. `timeline` is
    carried on, if the caller has begun one.

    On a GPU torch's allocator is configured for the whole process (`torch_device.cut_blocks_to_size`).

    Raises BundleError for a bundle that is refused, WeightsError for a checkpoint that doesn't fit it, TargetError
    for a device that is missing or too small and for ranks that are lost or differ, RequestError for options outside
    their range; all but what the device has no room for before a tensor is read.
    """
    if capture is not None and capture not in get_args(Capture):
        found = f"capture is {capture!r}, expected one of {', '.join(get_args(Capture))}"
        raise RequestError("engine-option-invalid", found)
    _check_options(
        bundle, weights, max_num_seqs=max_num_seqs, max_num_tokens=max_num_tokens,
        max_prefill_tokens=max_prefill_tokens, cache_bytes=cache_bytes, world_port=world_port,
    )  # fmt: skip
    if choices is not None and not isinstance(choices, (str, os.PathLike)):
        raise RequestError("engine-option-invalid", f"choices is {choices!r}, expected the path of a table")
    waits = timeouts_of(timeouts)
    timeline = Timeline() if timeline is None else timeline
    options = _Options(
        str(weights), max_num_seqs, max_num_tokens, cache_bytes, allow_config_mismatch,
        None if choices is None else str(choices), capture, (native,) if isinstance(native, str) else tuple(native),
    )  # fmt: skip
    found_launcher = launched()
    tp = (1 if found_launcher is None else found_launcher.num_ranks) if tp is None else tp
    check_world(tp, ep)
    world: World | None = None
    if tp == 1:
        loaded = _load_rank(bundle, options, lambda: place(device), None, timeline, trust)
    else:
        opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
        check_world(tp, ep, opened.graph)
        with timeline.phase("ranks"):
            world = _join(opened, options, found_launcher, tp, ep, device, waits, world_port, processes)
        local_rank = 0 if found_launcher is None else found_launcher.local_rank
        if isinstance(world.side, Follower):
            follow(world, bundle=opened, device=device, ep=ep, local_rank=local_rank, **options._asdict())
            raise SystemExit(0)
        loaded = _load_lead(opened, options, world, world.side, device, ep, local_rank, timeline)
    model, tokenizer = loaded.bundle.manifest.model, loaded.bundle.files("tokenizer")
    engine = Engine(
        loaded.runner, model, tokenizer_files=tokenizer, timeline=timeline, reuses_prefixes=reuse_prefixes,
        max_prefill_tokens=max_prefill_tokens,
    )  # fmt: skip
    if world is not None:
        weakref.finalize(engine, world.side.close)  # also at the end of the process
    return engine


class _Options(NamedTuple):
    """What a rank must know to load: options of `load`, as numbers and text."""

    weights: str
    max_num_seqs: int
    max_num_tokens: int
    cache_bytes: int | None
    allow_config_mismatch: bool
    choices: str | None
    capture: Capture | None
    native: tuple[str, ...] = ()

    @property
    def common(self) -> str:
        """Those that must be equal on all ranks; paths may be others on each host."""
        return ", ".join(f"{name} {value}" for name, value in self._asdict().items() if name not in _PATHS)


_PATHS = ("weights", "choices")


class _Loaded(NamedTuple):
    """What a rank runs."""

    bundle: Bundle
    runner: Runner


def _join(
    bundle: Bundle,
    options: _Options,
    found: Launched | None,
    tp: int,
    ep: int,
    device: str | torch.device | None,
    timeouts: Timeouts,
    port: int | None,
    processes: Processes | None,
) -> World:
    """Start the other ranks, or join those that a launcher has started."""
    if found is None:
        kind = None if device is None else str(device)
        given = options._asdict() | {"bundle": str(bundle.path)}
        return start_ranks(processes or Processes(tp), ep, timeouts, port, kind, given)
    if found.num_ranks != tp:
        message = f"tp is {tp}, and the launcher has started {found.num_ranks} processes"
        raise RequestError("engine-option-invalid", message, fix=f"give tp={found.num_ranks}, or none")
    return join_ranks(found, timeouts, port)


def _load_lead(
    bundle: Bundle, options: _Options, world: World, lead: Lead, device: str | torch.device | None, ep: int,
    local_rank: int, timeline: Timeline,
) -> _Loaded:  # fmt: skip
    """Rank 0 of several. If it fails, all of them end."""
    try:
        loaded = _load_rank(
            bundle, options, lambda: place(device, tp=lead.num_ranks, ep=ep, local_rank=local_rank), world, timeline
        )
        timelines = lead.gather("loaded", Loaded(timeline.to_json().encode()))
        timeline.ranks = {rank: msgspec.json.decode(each.timeline) for rank, each in enumerate(timelines) if rank}
        loaded.runner.at_close(lead.close)
        if options.capture == "before":
            _capture_before(loaded.runner, timeline)
    except BaseException as error:
        lead.fail(error)
        lead.close()
        raise
    return loaded


def follow(
    world: World, *, bundle: str | Bundle, device: str | torch.device | None, ep: int, local_rank: int, **options: Any
) -> None:
    """Be a follower: load as rank 0 does, and do what it orders until it ends the world.

    Raises the failure that has ended it, of this rank or of another, as all ranks do.
    """
    side, timeline = world.side, Timeline()
    assert isinstance(side, Follower)
    try:
        loaded = _load_rank(
            bundle, _Options(**options)._replace(native=tuple(options["native"])),
            lambda: place(device, rank=side.rank, tp=side.num_ranks, ep=ep, local_rank=local_rank), world, timeline,
        )  # fmt: skip
        side.gather("loaded", Loaded(timeline.to_json().encode()))
        runner = loaded.runner
        for raw in side.orders(spins=runner.device.kind == "cuda"):
            runner.obey(*runner.orders.decode(raw))
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


def _load_rank(
    bundle: str | Path | Bundle, options: _Options, placed: Callable[[], Placement], world: World | None,
    timeline: Timeline, trust: Trust | None = None,
) -> _Loaded:  # fmt: skip
    """Everything up to the first step, of one rank; None: of the only one."""
    table = None if options.choices is None else read_table(Path(options.choices))
    with timeline.phase("context"):
        placement = placed()
    target = placement.device
    on = torch.device(target.name)
    if world is not None and target.kind == "cuda":
        torch.cuda.set_device(on)  # nothing of this process may make a context on another rank's GPU
    capture = options.capture or ("background" if target.kind == "cuda" else "off")
    with target.use(), PinnedBuffers(target) as buffers:  # they are pinned while the bundle is read
        with timeline.phase("bundle") as phase, collector_held():
            opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
            graph = bind_world(opened.graph, placement)
            graph = msgspec.structs.replace(graph, caches=caches.with_slabs(graph.caches))
            limits = EngineLimits(
                options.max_num_seqs, options.max_num_tokens, opened.manifest.model.max_seq_len, options.cache_bytes
            )
            sizing.check_limits(graph, limits)
            BatchInputs(graph)  # refuses a graph without logits, and one that no step's inputs can be made for
            check_tokenizer(opened.files("tokenizer"))
            if not options.allow_config_mismatch:
                config_facts.check(opened.manifest.config, options.weights)
            table = _sealed(opened, target) if table is None else table
            what = target_of(on, table)._replace(tp=placement.tp)
            what, phase.note = _with_native(what, opened, options.native, trust)
            files = CheckpointFiles.open(options.weights)
            groups = {}
            if world is not None:
                groups["tp"] = meet(world, opened.digest, options.common, target, what, params_bytes(graph))
            program = restore(graph, device=on, target=what, groups=groups)
        with timeline.phase("weights") as phase:
            loaded = load_weights(
                graph, opened.manifest.checkpoint, files, device=target, buffers=buffers, whole=opened.graph
            )
            program.bind(loaded.tensors | constant_tensors(graph, opened.constants, target))
            phase.bytes = loaded.bytes_read
            phase.counters = {"bytes_read": loaded.bytes_read, "bytes_needed": loaded.bytes_needed}
        with timeline.phase("pools") as phase:
            sizes = () if capture == "off" else captured_sizes(graph, limits)

            def sized(limits: EngineLimits) -> ArenaSize:
                free = target.free_bytes()
                return sizing.size_arena(graph, limits, target, free=free, captured_sizes=sizes, target=what)

            size = sized(limits) if world is None else size_of_all(world.side, sized, limits)
            memory = CacheMemory(graph.caches, size.num_slabs, target)
            program.bind(memory.tensors)
            cut_blocks_to_size(on)
            program.place(size.addresses, tensor_of(target.alloc(size.addresses.num_bytes)))
            side = world and world.side
            runner = Runner(program, graph, memory, target, limits, captured_sizes=sizes, world=side, target=what)
            if side is not None:
                side.share_orders(runner.orders.max_bytes)
            phase.bytes, phase.counters = size.num_bytes, size.counters()
        if capture == "before" and world is None:
            _capture_before(runner, timeline)
    return _Loaded(opened, runner)


def _capture_before(runner: Runner, timeline: Timeline) -> None:
    with timeline.phase("captured") as phase:
        runner.capture_all()
        phase.counters = {"graphs": runner.captures.num_captured, "compilations": runner.native.compilations}


def _sealed(bundle: Bundle, device: Device) -> Table | None:
    """The choices that were measured on this very machine, and attached to the bundle; None if there are none."""
    tables = sealed_tables(bundle.attached) if device.kind == "cuda" else {}
    if not tables:
        return None
    from precast.kernels.machine import this_machine

    machine = this_machine()
    return next((table for table in tables.values() if table.machine == machine), None)


def _with_native(target: Target, bundle: Bundle, allowed: Sequence[str], trust: Trust | None) -> tuple[Target, str]:
    """The target with the kernels that are compiled already, and a word on where they come from; none for CPUs."""
    if target.device == "cpu":
        return target, ""
    chosen = choose(bundle, target.text, allowed=allowed, trust=trust)
    return target._replace(native=Native(chosen.layer)), chosen.note


@liveness.computed()
def captured_sizes(graph: Graph, limits: EngineLimits) -> tuple[int, ...]:
    """The sizes of the bundle's capture plan that the limits can fill."""
    plan = graph.capture if graph.capture.sizes else capture_plan(graph)
    return cut(plan, limits.max_num_tokens)


def constant_tensors(graph: Graph, constants: Mapping[str, Tensor], device: Device) -> dict[str, torch.Tensor]:
    """A bundle's constants by name, on the device. They have the types that the graph declares (`Bundle.open`)."""
    tensors = {}
    for value in graph.constants:
        _, shape, data = constants[value.name]
        dtype = BY_NAME[value.type.dtype]
        flat = torch.frombuffer(bytearray(data), dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
        tensors[value.name] = flat.reshape(shape).to(device.name)
    return tensors


def _check_options(bundle: object, weights: object, **numbers: object) -> None:
    if not isinstance(bundle, (str, os.PathLike, Bundle)):
        raise RequestError("engine-option-invalid", f"bundle is {bundle!r}, expected a path or a Bundle")
    if not isinstance(weights, (str, os.PathLike)):
        raise RequestError("engine-option-invalid", f"weights is {weights!r}, expected the path of a checkpoint")
    for name, value in numbers.items():
        if name in ("cache_bytes", "max_prefill_tokens", "world_port") and value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**63:
            expected = "an integer of at least 1, of 64 bits at most"
            raise RequestError("engine-option-invalid", f"{name} is {shown_value(value)}, expected {expected}")
