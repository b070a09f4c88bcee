"""A load without torch: context, native layer, weights and pools through the CUDA driver alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from precast.ir.artifact import Bundle
from precast.ir.bundle.trust import Trust
from precast.ir.graph.schema import Graph
from precast.ir.memory import caches
from precast.ir.memory.addresses import Addresses
from precast.ir.native import NativeLayer
from precast.ir.weights import config_facts
from precast.ir.weights.checkpoint import CheckpointFiles
from precast.kernels.linear import cublaslt
from precast.kernels.machine import machine_with
from precast.kernels.measured import Table, table_of
from precast.kernels.native import Native
from precast.kernels.sealed import sealed_tables
from precast.kernels.use import GPU, Target
from precast.loader import sizing
from precast.loader.cache.memory import CacheMemory
from precast.loader.collector import collector_held
from precast.loader.device import Buffer
from precast.loader.driver import weights
from precast.loader.driver.context import Begun
from precast.loader.driver.coverage import UnfitError, covered, most_sizes
from precast.loader.driver.device import DriverDevice
from precast.loader.driver.kernels import Kernels, missing
from precast.loader.driver.model import Model, hold
from precast.loader.driver.program import NativeProgram, NotCoveredError
from precast.loader.driver.runner import DriverRunner
from precast.loader.driver.weights import Planned, Ring
from precast.loader.engine.engine import Engine
from precast.loader.engine.tokenizer import check_tokenizer
from precast.loader.native import choose
from precast.loader.options import LoadOptions
from precast.loader.placement import Placement, bind_world
from precast.loader.run.batch import BatchInputs
from precast.loader.sizing import EngineLimits, captured_sizes
from precast.loader.timeline import Timeline


def load_with_driver(
    options: LoadOptions, timeline: Timeline, context: Future[Begun], *, layer: NativeLayer | None = None
) -> Engine:
    """See `precast.loader.load.load`. Raises UnfitError, before a tensor is read, for a model that it doesn't run.

    `context` is under way while the bundle is opened, and the rest is made ready while weights stream. `layer`: where
    kernels are taken from, whoever made it; None: from one of the bundle's that is admitted.
    """
    folder = options.folder()
    with timeline.phase("bundle") as phase, collector_held():
        opened = options.bundle if isinstance(options.bundle, Bundle) else Bundle.open(options.bundle)
        rules = options.rules(opened)
        limits = options.limits(opened.manifest.model.max_seq_len)
        if layer is None and not opened.native:
            raise UnfitError("the bundle has no native layer", opened)
        files = CheckpointFiles.open(folder)
        has_library = cublaslt.is_installed()  # it is loaded, while the context is made
        begun = context.result()
        timeline.add("context", start=begun.start, seconds=begun.seconds)
        device = begun.device
        target = target_of(device, _table(opened, device) if options.table is None else options.table)
        if not has_library:
            target = target._replace(kinds=target.kinds - {"library"})
        graph = bind_world(opened.graph, Placement(0, 1, 1, device))
        graph = msgspec.structs.replace(graph, caches=caches.with_slabs(graph.caches))
        sizing.check_limits(graph, limits)
        BatchInputs(graph)  # refuses a graph without logits, and one that no step's inputs can be made for
        try:
            if layer is None:
                layer, phase.note = _native_layer(opened, target, options.native, rules)
            ring = Ring(device)
            program, addresses = covered(graph, target, limits)
            if lacking := missing(program.launches(), layer):
                raise UnfitError(f"the native layer lacks {', '.join(lacking)}", opened)
            planned = weights.planned(graph, opened.manifest.checkpoint, files)
            if why := weights.uncovered(planned):
                raise UnfitError(why, opened)
        except NotCoveredError as error:
            raise UnfitError(str(error), opened) from None
        check_tokenizer(opened.files("tokenizer"))
        if not options.allow_config_mismatch:
            config_facts.check(opened.manifest.config, folder)
    with ThreadPoolExecutor(1, thread_name_prefix="precast-load") as pool:
        streamed = pool.submit(_streamed, planned, graph, opened, ring, timeline)
        try:
            with device.use():
                found = Native(layer)
                kernels = Kernels(found, device)
                kernels.make_products(program.launches())
            tensors = streamed.result()
        except BaseException:  # an interrupt too, which must not wait for a server that says nothing
            folder.stop()
            raise
    runner = _pools(options, timeline, program, addresses, graph, kernels, tensors, device, limits, target, found)
    return Engine(
        runner, opened.manifest.model, tokenizer_files=opened.files("tokenizer"), timeline=timeline,
        reuses_prefixes=options.reuse_prefixes, max_prefill_tokens=options.max_prefill_tokens,
    )  # fmt: skip


def target_of(device: DriverDevice, table: Table | None) -> Target:
    """The target that a device is: what `precast.kernels.registry.target_of` says of it where all but torch is
    installed."""
    target = GPU._replace(capability=device.capability, table=table_of(device.model) if table is None else table)
    return target.without_torch


def _table(opened: Bundle, device: DriverDevice) -> Table | None:
    """The choices that were measured on this very machine, and attached to the bundle; None if there are none."""
    tables = sealed_tables(opened.attached)
    if not tables:
        return None
    machine = machine_with(device.model, device.capability)
    return next((table for table in tables.values() if table.machine == machine), None)


def _native_layer(opened: Bundle, target: Target, allowed: Sequence[str], rules: Trust) -> tuple[NativeLayer, str]:
    """The layer that is admitted, and by which rule. Raises UnfitError where none is."""
    chosen = choose(opened, target.text, allowed=allowed, trust=rules)
    if chosen.layer is None:
        raise UnfitError(chosen.note, opened)
    return chosen.layer, chosen.note


def _streamed(planned: Planned, graph: Graph, opened: Bundle, ring: Ring, timeline: Timeline) -> Mapping[str, Buffer]:
    with timeline.phase("weights") as phase:
        loaded = weights.load_weights(planned, graph, ring=ring)
        phase.bytes = loaded.bytes_read
        phase.counters = {"bytes_read": loaded.bytes_read, "bytes_needed": loaded.bytes_needed}
        return loaded.buffers | weights.constants(graph, opened.constants, ring.device)


def _pools(
    options: LoadOptions,
    timeline: Timeline,
    program: NativeProgram,
    addresses: Addresses,
    graph: Graph,
    kernels: Kernels,
    tensors: Mapping[str, Buffer],
    device: DriverDevice,
    limits: EngineLimits,
    target: Target,
    found: Native,
) -> DriverRunner:
    """The runner, with caches in what the weights have left."""
    most = most_sizes(graph, limits)
    with device.use(), timeline.phase("pools") as phase:
        sizes = () if options.capture == "off" else captured_sizes(graph, limits)
        held = hold(program, graph, addresses, most, device)
        free = device.free_bytes() + held.activations.shape[0]
        size = sizing.size_arena(
            graph, limits, device, free=free, captured_sizes=sizes, target=target, planned=addresses
        )
        memory = CacheMemory(graph.caches, size.num_slabs, device)
        pages = {pool.pages: memory.num_pages[pool.name] for pool in memory.plan.pools}
        model = Model(program, graph, kernels, addresses, {**tensors, **memory.buffers}, held, pages)
        runner = DriverRunner(model, graph, memory, device, limits, found, captured_sizes=sizes)
        phase.bytes, phase.counters = size.num_bytes, size.counters()
    if options.capture == "before":
        with timeline.phase("captured") as phase:
            runner.capture_all()
            phase.counters = {"graphs": runner.captures.num_captured}
    return runner
