"""What a start makes ready while weights stream: launches, kernels, pools, the runner, a first step. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from precast.ir.artifact import Bundle
from precast.ir.errors import TargetError
from precast.ir.graph.schema import Graph
from precast.ir.memory import caches
from precast.ir.memory.addresses import Addresses
from precast.ir.native import NativeLayer
from precast.ir.verify import verifier
from precast.ir.weights import config_facts
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
from precast.loader.driver.coverage import beside_the_graph, covered, lacking, most_sizes
from precast.loader.driver.device import DriverDevice
from precast.loader.driver.kernels import Kernels, missing
from precast.loader.driver.model import Model, hold
from precast.loader.driver.program import NativeProgram, NotCoveredError
from precast.loader.driver.runner import DriverRunner
from precast.loader.driver.unfit import UnfitError
from precast.loader.engine.engine import Engine
from precast.loader.engine.tokenizer import check_tokenizer
from precast.loader.options import LoadOptions
from precast.loader.run.batch import BatchInputs
from precast.loader.sizing import EngineLimits, captured_sizes
from precast.loader.timeline import Timeline

WARMED_TOKENS = 256
"""Of the prompt that is computed before there is one: a size whose products are cuBLASLt's, which loads their kernels
when they first run. All others are loaded by their names."""


def runner_ready(
    options: LoadOptions,
    timeline: Timeline,
    opened: Bundle,
    graph: Graph,
    layer: NativeLayer,
    params: Mapping[str, Buffer],
    device: DriverDevice,
) -> DriverRunner:
    """The runner of a graph that is bound to its world and not verified yet, over params whose bytes are on their way.

    Raises UnfitError for what isn't computed by launches of the layer, TargetError (kernel-missing) for kernels that
    steps of some size lack, and what `load` raises for the rest.
    """
    limits = options.limits(opened.manifest.model.max_seq_len)
    native = Native(layer)
    kernels = Kernels(native, device)
    with device.use():
        with timeline.phase("launches"), collector_held():
            verifier.check(graph)
            graph = msgspec.structs.replace(graph, caches=caches.with_slabs(graph.caches))
            sizing.check_limits(graph, limits)
            BatchInputs(graph)  # refuses a graph without logits, and one that no step's inputs can be made for
            program, addresses = _as_launches(graph, options, opened, layer, device, limits)
            kernels.load(program.launches())
            check_tokenizer(opened.files("tokenizer"))
            if not options.allow_config_mismatch:
                config_facts.check(opened.manifest.config, options.folder())
        with timeline.phase("pools") as phase, collector_held():
            tensors = {**params, **weights.constants(graph, opened.constants, device)}
            sizes = () if options.capture == "off" else captured_sizes(graph, limits)
            held = hold(program, graph, addresses, most_sizes(graph, limits), device)
            free = device.free_bytes() + held.activations.shape[0]
            size = sizing.size_arena(
                graph, limits, device, free=free, captured_sizes=sizes, target=program.target, planned=addresses
            )
            memory = CacheMemory(graph.caches, size.num_slabs, device)
            pages = {pool.pages: memory.num_pages[pool.name] for pool in memory.plan.pools}
            model = Model(program, graph, kernels, addresses, {**tensors, **memory.buffers}, held, pages)
            runner = DriverRunner(model, graph, memory, device, limits, native, captured_sizes=sizes)
            phase.bytes, phase.counters = size.num_bytes, size.counters()
        with timeline.phase("warm-up"), collector_held():
            runner.warm_up(min(WARMED_TOKENS, limits.max_num_tokens))
    return runner


def engine_of(runner: DriverRunner, options: LoadOptions, timeline: Timeline, opened: Bundle) -> Engine:
    """The engine of what was loaded; with `capture="before"` all sizes are captured."""
    if options.capture == "before":
        with timeline.phase("captured") as phase:
            runner.capture_all()
            phase.counters = {"graphs": runner.captures.num_captured}
    return Engine(
        runner, opened.manifest.model, tokenizer_files=opened.files("tokenizer"), timeline=timeline,
        reuses_prefixes=options.reuse_prefixes, max_prefill_tokens=options.max_prefill_tokens,
    )  # fmt: skip


def _as_launches(
    graph: Graph, options: LoadOptions, opened: Bundle, layer: NativeLayer, device: DriverDevice, limits: EngineLimits
) -> tuple[NativeProgram, Addresses]:
    """The graph as launches, and where its values lie. As `runner_ready` raises."""
    target = target_of(device, _table(opened, device) if options.table is None else options.table)
    without = ""
    if not cublaslt.is_installed():
        target = target._replace(kinds=target.kinds - {"library"})
        without = "; libcublasLt, which computes most products, is not installed: pip install nvidia-cublas"
    try:
        program, addresses = covered(graph, target, limits)
    except NotCoveredError as error:
        raise UnfitError(f"{error}{without}", opened) from None
    beside = ((each.launch, each.key) for each in beside_the_graph(graph, target, 1, 1))
    if gone := missing((*program.launches(), *beside), layer):
        raise UnfitError(f"the native layer lacks {', '.join(gone)}", opened)
    _check_kernels(lacking(program, graph, addresses, layer, most_sizes(graph, limits)))
    return program, addresses


def _check_kernels(gone: Sequence[str]) -> None:
    if gone:
        raise TargetError(
            "kernel-missing",
            f"the native layer has no kernel for some steps, of {', '.join(gone)}",
            fix="load the bundle with backend='torch', or add the layer again with this release of Precast",
        )


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
