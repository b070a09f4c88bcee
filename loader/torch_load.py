"""A load with torch as the backend: on a CPU, and on GPUs for what the driver alone doesn't run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from precast.ir.artifact import Bundle
from precast.ir.bundle.trust import Trust
from precast.ir.errors import TargetError
from precast.ir.graph.logit_parts import in_parts
from precast.ir.graph.schema import Graph
from precast.ir.memory import caches
from precast.ir.waits import ended
from precast.ir.weights import config_facts
from precast.ir.weights.checkpoint import CheckpointFiles
from precast.ir.weights.tensorfile import Tensor
from precast.kernels.collectives.group import Group
from precast.kernels.dtypes import BY_NAME
from precast.kernels.measured import Table
from precast.kernels.native import Native
from precast.kernels.registry import target_of
from precast.kernels.rounded.fusing import with_rounded_inputs
from precast.kernels.sampling.parts import VocabularyPart
from precast.kernels.sealed import sealed_tables
from precast.kernels.use import Target, types_in
from precast.loader import sizing
from precast.loader.cache.memory import CacheMemory
from precast.loader.collector import collector_held
from precast.loader.device import Device
from precast.loader.engine.engine import Engine
from precast.loader.engine.tokenizer import check_tokenizer
from precast.loader.native import choose
from precast.loader.options import LoadOptions
from precast.loader.placement import Placement, bind_world, place
from precast.loader.program.restore import Program, restore
from precast.loader.run.batch import BatchInputs
from precast.loader.run.drawing import Drawing, sampler_on
from precast.loader.run.rank_runner import RankRunner
from precast.loader.run.runner import Runner
from precast.loader.run.share_runner import ShareRunner
from precast.loader.run.stages import stages_of
from precast.loader.sizing import ArenaSize, EngineLimits, Values, captured_sizes
from precast.loader.timeline import Timeline
from precast.loader.torch_device import cut_blocks_to_size, tensor_of
from precast.loader.turns import short_turns
from precast.loader.weights.stream import load_weights, params_bytes
from precast.loader.weights.workers import PinnedBuffers
from precast.loader.world.meet import meet
from precast.loader.world.start import World
from precast.loader.world.together import agreed, size_of_all

if TYPE_CHECKING:
    from precast.kernels.sampling.on_ranks import PartSampler


class Loaded(NamedTuple):
    """What a rank runs."""

    bundle: Bundle
    runner: Runner


class Ranks(NamedTuple):
    """A load by several ranks, as one of them sees it; `options` are those that must be equal on all of them."""

    world: World
    options: str


def load_with_torch(options: LoadOptions, timeline: Timeline) -> Engine:
    """See `precast.loader.load.load`."""
    loaded = load_rank(options, lambda: place(options.device), timeline)
    if options.capture == "before":
        capture_before(loaded.runner, timeline)
    return engine_of(loaded, options, timeline)


def engine_of(loaded: Loaded, options: LoadOptions, timeline: Timeline) -> Engine:
    """The engine of what was loaded."""
    model, tokenizer = loaded.bundle.manifest.model, loaded.bundle.files("tokenizer")
    return Engine(
        loaded.runner, model, tokenizer_files=tokenizer, timeline=timeline, reuses_prefixes=options.reuse_prefixes,
        max_prefill_tokens=options.max_prefill_tokens,
    )  # fmt: skip


def load_rank(
    options: LoadOptions, placed: Callable[[], Placement], timeline: Timeline, ranks: Ranks | None = None
) -> Loaded:
    """Everything up to the first step, of one rank; None: of the only one."""
    folder = options.folder()
    with timeline.phase("context"):
        placement = placed()
    target = placement.device
    on = torch.device(target.name)
    if ranks is not None and target.kind == "cuda":
        torch.cuda.set_device(on)  # nothing of this process may make a context on another rank's GPU
    with target.use(), PinnedBuffers(target) as buffers:  # they are pinned while the bundle is read
        with timeline.phase("bundle") as phase, collector_held():
            opened = options.bundle if isinstance(options.bundle, Bundle) else Bundle.open(options.bundle)
            rules = options.rules(opened)
            graph = bind_world(opened.graph, placement)
            graph = msgspec.structs.replace(graph, caches=caches.with_slabs(graph.caches))
            limits = options.limits(opened.manifest.model.max_seq_len)._replace(dp=placement.dp)
            sizing.check_limits(graph, limits)
            BatchInputs(graph)  # refuses a graph without logits, and one that no step's inputs can be made for
            check_tokenizer(opened.files("tokenizer"))
            if not options.allow_config_mismatch:
                config_facts.check(opened.manifest.config, folder)
            table = _sealed(opened, target) if options.table is None else options.table
            what = target_of(on, table)._replace(tp=placement.tp)
            graph = with_rounded_inputs(graph, what)
            what, phase.note = _with_native(what, opened, options, rules, placement, ranks)
            files = CheckpointFiles.open(folder)
            groups: dict[str, Group] = {}
            part = sampler = None
            if ranks is not None:
                groups = dict(meet(ranks.world, placement, opened.digest, ranks.options, what, params_bytes(graph)))
                if "tp" in groups and placement.stage == placement.pp - 1:
                    graph, part, sampler = _in_parts(graph, groups["tp"], on, limits)
            program = restore(graph, device=on, target=what, groups=groups)
        with timeline.phase("weights") as phase, short_turns(), collector_held():
            pool = ThreadPoolExecutor(1, thread_name_prefix="precast-values")
            values = pool.submit(sizing.values_of, graph, limits, target, what)  # while weights are read
            pool.shutdown(wait=False)
            loaded = load_weights(
                graph, opened.manifest.checkpoint, files, device=target, buffers=buffers, whole=opened.graph
            )
            program.bind(loaded.tensors | constant_tensors(graph, opened.constants, target))
            phase.bytes = loaded.bytes_read
            phase.counters = {"bytes_read": loaded.bytes_read, "bytes_needed": loaded.bytes_needed}
        with timeline.phase("pools") as phase, collector_held():
            stages = stages_of(opened.graph, placement, groups)
            drawing = Drawing(graph, on, what, part, sampler, stages)
            runner, size = _pools(options, program, graph, drawing, target, limits, what, ranks, ended(values))
            phase.bytes, phase.counters = size.num_bytes, size.counters()
    return Loaded(opened, runner)


def _in_parts(
    graph: Graph, group: Group, on: torch.device, limits: EngineLimits
) -> tuple[Graph, VocabularyPart | None, PartSampler | None]:
    """The graph with the logits of the rank's part of the vocabulary, and what draws from them; where that can be."""
    found = in_parts(graph)
    if found is None:
        return graph, None, None
    part = VocabularyPart(group, found.size, found.columns)
    if on.type == "cpu":
        return found.graph, part, None
    dtype = BY_NAME[types_in(found.graph)[found.graph.outputs["logits"]].dtype]
    sampler = sampler_on(part, dtype, limits.dp * limits.num_rows)
    return (graph, None, None) if sampler is None else (found.graph, part, sampler)


def _pools(
    options: LoadOptions, program: Program, graph: Graph, drawing: Drawing, device: Device, limits: EngineLimits,
    target: Target, ranks: Ranks | None, values: Values,
) -> tuple[Runner, ArenaSize]:  # fmt: skip
    """The runner, with caches in what the weights have left. `values`: what those of a step take."""
    capture = options.capture or ("background" if device.kind == "cuda" else "off")
    sizes = () if capture == "off" else captured_sizes(graph, limits)

    def sized(limits: EngineLimits) -> ArenaSize:
        free = device.free_bytes()
        return sizing.size_arena(graph, limits, device, free=free, captured_sizes=sizes, target=target, planned=values)

    size = sized(limits) if ranks is None else size_of_all(ranks.world.side, sized, limits)
    memory = CacheMemory(graph.caches, size.num_slabs, device)
    program.bind(memory.tensors)
    cut_blocks_to_size(torch.device(device.name))
    program.place(size.addresses, tensor_of(device.alloc(size.addresses.num_bytes)))
    if ranks is None:
        runner = Runner(program, graph, memory, device, limits, captured_sizes=sizes, target=target, drawing=drawing)
        return runner, size
    side = ranks.world.side
    kind = RankRunner if limits.dp == 1 else ShareRunner
    shared = kind(program, graph, memory, device, limits, side, captured_sizes=sizes, target=target, drawing=drawing)
    side.share_orders(shared.max_order_bytes)
    return shared, size


def capture_before(runner: Runner, timeline: Timeline) -> None:
    """Capture all sizes at once."""
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


def _with_native(
    target: Target, bundle: Bundle, options: LoadOptions, trust: Trust, placement: Placement, ranks: Ranks | None
) -> tuple[Target, str]:
    """The target with the kernels that are compiled already, and a word on where they come from; none for CPUs. Ranks
    use the same layer, or none of them does.

    Raises TargetError `native-refused` where a digest is allowed and no layer is used.
    """
    if target.device == "cpu":
        if options.native:
            message = "--allow-native is given, and the device is cpu, for which there is no native layer"
            raise TargetError("native-refused", message, where=str(bundle.path), fix="leave it out, or name a GPU")
        return target, ""
    agree = None if ranks is None else partial(agreed, ranks.world.side, rules=options.rules_text())
    chosen = choose(
        bundle,
        target.text,
        allowed=options.native,
        trust=trust,
        world=(placement.tp, placement.ep),
        dp=placement.dp,
        agree=agree,
    )
    return target._replace(native=Native(chosen.layer)), chosen.note


def constant_tensors(graph: Graph, constants: Mapping[str, Tensor], device: Device) -> dict[str, torch.Tensor]:
    """A bundle's constants by name, on the device. They have the types that the graph declares (`Bundle.open`)."""
    tensors = {}
    for value in graph.constants:
        _, shape, data = constants[value.name]
        dtype = BY_NAME[value.type.dtype]
        flat = torch.frombuffer(bytearray(data), dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
        tensors[value.name] = flat.reshape(shape).to(device.name)
    return tensors
