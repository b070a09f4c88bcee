"""What a start makes ready while weights stream: launches, kernels, pools, the runner, a first step. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from precast.ir.artifact import Bundle
from precast.ir.errors import TargetError
from precast.ir.graph.schema import Graph
from precast.ir.memory import caches
from precast.ir.memory.addresses import Addresses
from precast.ir.native import NativeLayer
from precast.ir.verify import verifier
from precast.ir.waits import ended
from precast.ir.weights import config_facts
from precast.kernels.linear import cublaslt
from precast.kernels.machine import machine_with
from precast.kernels.measured import Table, table_of
from precast.kernels.native import Native
from precast.kernels.records import Launch
from precast.kernels.rounded.fusing import with_rounded_inputs
from precast.kernels.sampling.launches import rows_apart
from precast.kernels.sealed import sealed_tables
from precast.kernels.use import GPU, Target
from precast.loader import sizing
from precast.loader.cache.memory import CacheMemory
from precast.loader.collector import collector_held
from precast.loader.device import Buffer
from precast.loader.driver import on_host
from precast.loader.driver.coverage import beside_the_graph, covered, held_sizes, lacking, most_sizes
from precast.loader.driver.device import DriverDevice
from precast.loader.driver.kernels import Kernels, missing
from precast.loader.driver.model import Model, PartDrawing, hold
from precast.loader.driver.placed import NotCoveredError
from precast.loader.driver.program import NativeProgram
from precast.loader.driver.runner import DriverRunner
from precast.loader.driver.unfit import UnfitError
from precast.loader.engine.engine import Engine
from precast.loader.engine.tokenizer import check_tokenizer
from precast.loader.options import LoadOptions
from precast.loader.run.batch import BatchInputs
from precast.loader.sizing import ArenaSize, EngineLimits, captured_sizes
from precast.loader.timeline import Timeline

if TYPE_CHECKING:
    from precast.loader.driver.connection import Connection

WARMED_TOKENS = 256
"""Of the prompt that is computed before there is one: a size whose products are cuBLASLt's, which loads their kernels
when they first run. All others are loaded by their names."""


Agree = Callable[[Callable[[EngineLimits], ArenaSize], EngineLimits], ArenaSize]
"""Sizes caches for all ranks, given how one sizes its own."""


class Runnable(NamedTuple):
    """A model as launches of a layer's kernels, and where its values lie. `connection` and `drawing`: of one of several
    ranks."""

    graph: Graph
    limits: EngineLimits
    layer: NativeLayer
    program: NativeProgram
    addresses: Addresses
    connection: Connection | None = None
    drawing: PartDrawing | None = None


def runner_ready(
    options: LoadOptions,
    timeline: Timeline,
    opened: Bundle,
    graph: Graph,
    layer: NativeLayer,
    params: Mapping[str, Buffer],
    device: DriverDevice,
    are_there: Callable[[], bool],
) -> DriverRunner:
    """The runner of a `checked` graph over params whose bytes are on their way; `are_there` says when they have come.

    Raises UnfitError for what isn't computed by launches of the layer, TargetError (kernel-missing) for kernels that
    steps of some size lack, as far as there is time to look before the bytes have come, and what `load` raises for the
    rest.
    """
    limits = options.limits(opened.manifest.model.max_seq_len)
    with device.use():
        with timeline.phase("launches"), collector_held():
            kernels = Kernels(Native(layer), device)
            with ThreadPoolExecutor(1, thread_name_prefix="precast-kernels") as pool:
                # The driver loads one after another, and the interpreter is free meanwhile. A layer for other worlds
                # has kernels besides that no launch takes.
                loading = None if layer.worlds else pool.submit(kernels.load_all, layer)
                try:
                    target = target_of(device, opened, options)
                    graph = with_rounded_inputs(graph, target)
                    model = as_launches(graph, target, opened, layer, limits)
                    if loading is not None:
                        ended(loading)
                except BaseException:  # an interrupt too
                    kernels.stop()
                    raise
            kernels.load(model.program.launches())
        tensors = {**params, **on_host.constants(graph, opened.constants, device)}
        runner = pools(model, kernels, tensors, options, timeline, device)
        with timeline.phase("warm-up"), collector_held():
            runner.warm_up(min(WARMED_TOKENS, limits.max_num_tokens), are_there)
            runner.unchecked = _looked_up(model)
            for _ in runner.unchecked:
                if are_there():
                    break  # the rest is looked up once there is a token
    return runner


def checked(graph: Graph, options: LoadOptions, opened: Bundle) -> Graph:
    """A graph that is bound to its world, verified, with its caches in slabs.

    Raises what `verifier.check`, `with_slabs` and `check_files` do.
    """
    verifier.check(graph)
    check_files(options, opened)
    return with_slabs(graph, options.limits(opened.manifest.model.max_seq_len))


def with_slabs(graph: Graph, limits: EngineLimits) -> Graph:
    """A verified graph with its caches in slabs. Raises what `sizing.check_limits` and `BatchInputs` do."""
    graph = msgspec.structs.replace(graph, caches=caches.with_slabs(graph.caches))
    sizing.check_limits(graph, limits)
    BatchInputs(graph)  # refuses a graph without logits, and one that no step's inputs can be made for
    return graph


def as_launches(
    graph: Graph, target: Target, opened: Bundle, layer: NativeLayer, limits: EngineLimits,
    connection: Connection | None = None, drawing: PartDrawing | None = None,
) -> Runnable:  # fmt: skip
    """The graph as launches. Raises UnfitError where it can't be, or the layer lacks some."""
    try:
        program, addresses = covered(graph, target, limits, connection.collectives if connection else None)
    except NotCoveredError as error:
        without = ""
        if "library" not in target.kinds:
            without = "; libcublasLt, which computes most products, is not installed: pip install nvidia-cublas"
        raise UnfitError(f"{error}{without}", opened) from None
    drawn = _drawing_launches(graph, target, drawing)
    if gone := missing((*program.launches(), *drawn), layer):
        raise UnfitError(f"the native layer lacks {', '.join(gone)}", opened)
    return Runnable(graph, limits, layer, program, addresses, connection, drawing)


def kernels_of(model: Runnable, device: DriverDevice) -> Kernels:
    """The kernels that steps of a rank may take, loaded. Raises what `check_kernels` does."""
    made = Kernels(Native(model.layer), device, model.connection.calls if model.connection else None)
    check_kernels(model, made)
    return made


def check_kernels(model: Runnable, kernels: Kernels) -> None:
    """Load the kernels that steps may take. Raises TargetError (kernel-missing) for those that the layer lacks."""
    kernels.load(model.program.launches())
    for _ in _looked_up(model):
        pass


def _looked_up(model: Runnable) -> Iterator[None]:
    """Look up the kernels of steps, size by size. Raises TargetError (kernel-missing) in the end if some are not there,
    as a layer of another release of Precast may lack some."""
    part = None if model.drawing is None else model.drawing.part
    most, gone = most_sizes(model.graph, model.limits), set[str]()
    for each in lacking(model.program, model.graph, model.addresses, model.layer, most, part):
        gone |= each
        yield
    if gone:
        raise TargetError(
            "kernel-missing",
            f"the native layer has no kernel for some steps, of {', '.join(sorted(gone))}",
            fix="load the bundle with backend='torch', or add the layer again with this release of Precast",
        )


def check_files(options: LoadOptions, opened: Bundle) -> None:
    """Refuse a tokenizer that isn't read, and a checkpoint with another config than the bundle's."""
    check_tokenizer(opened.files("tokenizer"))
    if not options.allow_config_mismatch:
        config_facts.check(opened.manifest.config, options.folder())


def pools(
    model: Runnable, kernels: Kernels, tensors: Mapping[str, Buffer], options: LoadOptions, timeline: Timeline,
    device: DriverDevice, *, kind: type[DriverRunner] = DriverRunner, agree: Agree | None = None,
) -> DriverRunner:  # fmt: skip
    """The runner of this kind over params and constants, with caches in what they leave. `agree`: on the size of
    caches, given how this rank sizes them, and the limits; None: as this rank does."""
    graph, program, addresses = model.graph, model.program, model.addresses
    with timeline.phase("pools") as phase, collector_held():
        sizes = () if options.capture == "off" else captured_sizes(graph, model.limits)
        held = hold(program, graph, addresses, held_sizes(graph, model.limits), device, model.drawing)

        values = sizing.Values(addresses)

        def sized(limits: EngineLimits) -> ArenaSize:
            free = device.free_bytes() + held.activations.shape[0]
            return sizing.size_arena(
                graph, limits, device, free=free, captured_sizes=sizes, target=program.target, planned=values
            )

        size = sized(model.limits) if agree is None else agree(sized, model.limits)
        memory = CacheMemory(graph.caches, size.num_slabs, device)
        pages = {pool.pages: memory.num_pages[pool.name] for pool in memory.plan.pools}
        shared = model.connection.memory if model.connection else {}
        given = {**tensors, **memory.buffers, **shared}
        ready = Model(program, graph, kernels, addresses, given, held, pages, model.drawing)
        phase.bytes, phase.counters = size.num_bytes, size.counters()
        return kind(ready, graph, memory, device, model.limits, kernels.native, captured_sizes=sizes)


def capture_before(runner: DriverRunner, timeline: Timeline) -> None:
    """Capture all sizes at once."""
    with timeline.phase("captured") as phase:
        runner.capture_all()
        phase.counters = {"graphs": runner.captures.num_captured}


def engine_of(runner: DriverRunner, options: LoadOptions, timeline: Timeline, opened: Bundle) -> Engine:
    """The engine of what was loaded."""
    return Engine(
        runner, opened.manifest.model, tokenizer_files=opened.files("tokenizer"), timeline=timeline,
        reuses_prefixes=options.reuse_prefixes, max_prefill_tokens=options.max_prefill_tokens,
    )  # fmt: skip


def target_of(device: DriverDevice, opened: Bundle, options: LoadOptions) -> Target:
    """What kernels are chosen by: what `precast.kernels.registry.target_of` says of the device where all but torch is
    installed."""
    table = _table(opened, device) if options.table is None else options.table
    found = GPU._replace(capability=device.capability, table=table_of(device.model) if table is None else table)
    if not cublaslt.has_scales():
        found = found._replace(kinds=found.kinds - {"library 12.9"})
    if not cublaslt.is_installed():
        found = found._replace(kinds=found.kinds - {"library"})
    return found.without_torch


def _drawing_launches(graph: Graph, target: Target, drawing: PartDrawing | None) -> Iterator[tuple[Launch, str]]:
    """What steps launch beside the graph, of all numbers of rows that are drawn differently, each with its key."""
    for rows in [1] if drawing is None else rows_apart(drawing.most_rows):
        for each in beside_the_graph(graph, target, 1, rows, None if drawing is None else drawing.part):
            yield each.launch, each.key


def _table(opened: Bundle, device: DriverDevice) -> Table | None:
    """The choices that were measured on this very machine, and attached to the bundle; None if there are none."""
    tables = sealed_tables(opened.attached)
    if not tables:
        return None
    machine = machine_with(device.model, device.capability)
    return next((table for table in tables.values() if table.machine == machine), None)
