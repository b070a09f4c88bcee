"""A load without torch: context, native layer, weights and pools through the CUDA driver alone."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import msgspec

from precast.ir.artifact import Bundle
from precast.ir.bundle.trust import Trust
from precast.ir.errors import TargetError
from precast.ir.graph.logit_parts import in_parts
from precast.ir.graph.schema import Graph
from precast.ir.memory import caches
from precast.ir.memory.addresses import Addresses
from precast.ir.native import NativeLayer
from precast.ir.weights import config_facts
from precast.ir.weights.checkpoint import CheckpointFiles
from precast.ir.weights.tensorfile import element_bytes
from precast.kernels.collectives.launches import MACROS, Among
from precast.kernels.linear import cublaslt
from precast.kernels.machine import machine_with
from precast.kernels.measured import Table, table_of
from precast.kernels.native import Native
from precast.kernels.records import Launch
from precast.kernels.sampling.launches import rows_apart, told_bytes
from precast.kernels.sealed import sealed_tables
from precast.kernels.step_launches import DrawnPart
from precast.kernels.use import GPU, Target
from precast.loader import sizing
from precast.loader.cache.memory import CacheMemory
from precast.loader.collector import collector_held
from precast.loader.device import Buffer
from precast.loader.driver import weights
from precast.loader.driver.connection import Connection
from precast.loader.driver.context import Begun
from precast.loader.driver.coverage import UnfitError, beside_the_graph, covered, lacking, most_sizes
from precast.loader.driver.device import DriverDevice
from precast.loader.driver.kernels import Kernels, missing
from precast.loader.driver.model import Model, PartDrawing, hold, logits_type
from precast.loader.driver.placed import NotCoveredError
from precast.loader.driver.program import NativeProgram
from precast.loader.driver.runner import DriverRankRunner, DriverRunner
from precast.loader.driver.weights import Planned, Ring
from precast.loader.engine.engine import Engine
from precast.loader.engine.tokenizer import check_tokenizer
from precast.loader.native import choose
from precast.loader.options import LoadOptions
from precast.loader.placement import Placement, bind_world
from precast.loader.run.batch import BatchInputs
from precast.loader.sizing import ArenaSize, EngineLimits, captured_sizes
from precast.loader.timeline import Timeline
from precast.loader.world.agree import Facts, Said, by_rank, check_facts, machine
from precast.loader.world.follower import Follower
from precast.loader.world.lead import Lead
from precast.loader.world.together import agreed, size_of_all


class Ranks(NamedTuple):
    """A load by several ranks of one host, as rank `among.rank` sees it, which has the GPU of that number. `folder` is
    one that nobody else may look into; `options` are those that must be equal on all ranks."""

    side: Lead | Follower
    among: Among
    ep: int
    folder: Path
    options: str

    def exchange(self, name: str, said: bytes) -> list[bytes]:
        """What all ranks have to say under this name, by rank."""
        return [each.value for each in self.side.gather(name, Said(said))]


ALONE = Among(0, 1)


def load_with_driver(
    options: LoadOptions, timeline: Timeline, context: Future[Begun], *, layer: NativeLayer | None = None
) -> Engine:
    """See `precast.loader.load.load`. Raises UnfitError, before a tensor is read, for a model that it doesn't run.

    `context` is under way while the bundle is opened, and the rest is made ready while weights stream. `layer`: where
    kernels are taken from, whoever made it; None: from one of the bundle's that is admitted.
    """
    loaded = load_rank(options, timeline, context, layer=layer)
    if options.capture == "before":
        capture_before(loaded.runner, timeline)
    return engine_of(loaded, options, timeline)


class Loaded(NamedTuple):
    """What a rank runs."""

    bundle: Bundle
    runner: DriverRunner


def engine_of(loaded: Loaded, options: LoadOptions, timeline: Timeline) -> Engine:
    """The engine of what was loaded."""
    opened, runner = loaded
    return Engine(
        runner, opened.manifest.model, tokenizer_files=opened.files("tokenizer"), timeline=timeline,
        reuses_prefixes=options.reuse_prefixes, max_prefill_tokens=options.max_prefill_tokens,
    )  # fmt: skip


def capture_before(runner: DriverRunner, timeline: Timeline) -> None:
    """Capture all sizes at once."""
    with timeline.phase("captured") as phase:
        runner.capture_all()
        phase.counters = {"graphs": runner.captures.num_captured}


def load_rank(
    options: LoadOptions, timeline: Timeline, context: Future[Begun], *, layer: NativeLayer | None = None,
    ranks: Ranks | None = None,
) -> Loaded:  # fmt: skip
    """Everything up to the first step, of one rank; None: of the only one. Raises what `load_with_driver` raises; of
    several ranks, UnfitError on all where it is one's."""
    folder = options.folder()
    with timeline.phase("bundle") as phase, collector_held():
        if ranks is None:
            found = _prepared(options, timeline, context, layer, None)
        else:
            found = _prepared_together(options, timeline, context, ranks)
        phase.note = found.note
        check_tokenizer(found.opened.files("tokenizer"))
        if not options.allow_config_mismatch:
            config_facts.check(found.opened.manifest.config, folder)
    opened, device, program = found.opened, found.ring.device, found.program
    with ThreadPoolExecutor(1, thread_name_prefix="precast-load") as pool:
        streamed = pool.submit(_streamed, found.planned, found.graph, opened, found.ring, timeline)
        try:
            with device.use():
                native = Native(found.layer)
                kernels = Kernels(native, device, found.connection.calls if found.connection else None)
                kernels.make_products(program.launches())
            part = None if found.drawing is None else found.drawing.part
            most = most_sizes(found.graph, found.limits)
            _check_kernels(lacking(program, found.graph, found.addresses, found.layer, most, part))
            tensors = streamed.result()
        except BaseException:  # an interrupt too, which must not wait for a server that says nothing
            folder.stop()
            raise
    return Loaded(opened, _pools(options, timeline, found, kernels, tensors, native, ranks))


class _Prepared(NamedTuple):
    """A model that the driver runs, before a tensor is read. `note`: where its kernels come from."""

    opened: Bundle
    target: Target
    graph: Graph
    limits: EngineLimits
    layer: NativeLayer
    note: str
    program: NativeProgram
    addresses: Addresses
    planned: Planned
    ring: Ring
    connection: Connection | None = None
    drawing: PartDrawing | None = None


def _prepared_together(options: LoadOptions, timeline: Timeline, context: Future[Begun], ranks: Ranks) -> _Prepared:
    """`_prepared` on all ranks, or UnfitError on all, with what each says."""
    found, why = None, ""
    connected: list[Connection] = []
    opened = options.bundle if isinstance(options.bundle, Bundle) else None
    try:
        found = _prepared(options, timeline, context, None, (ranks, connected))
    except UnfitError as error:
        why, opened = str(error), error.opened
    said = [each.decode() for each in ranks.exchange("driver", why.encode())]
    if not any(said):
        assert found is not None, "nothing stands in the way"
        return found
    for each in connected:
        each.leave()
        ranks.exchange("left", b"")
        each.close()
    raise UnfitError(said[0] if len({*said}) == 1 else by_rank([each or "would run it" for each in said]), opened)


def _prepared(
    options: LoadOptions, timeline: Timeline, context: Future[Begun], layer: NativeLayer | None,
    together: tuple[Ranks, list[Connection]] | None,
) -> _Prepared:  # fmt: skip
    """A model made ready for its weights. `together`: with which ranks, and a list for what connects them."""
    opened = options.bundle if isinstance(options.bundle, Bundle) else Bundle.open(options.bundle)
    ranks = None if together is None else together[0]
    among, ep = (ALONE, 1) if ranks is None else (ranks.among, ranks.ep)
    rules = options.rules(opened)
    limits = options.limits(opened.manifest.model.max_seq_len)
    if layer is None and not opened.native:
        raise UnfitError("the bundle has no native layer", opened)
    files = CheckpointFiles.open(options.folder())
    has_library = cublaslt.is_installed()  # it is loaded, while the context is made
    begun = context.result()
    timeline.add("context", start=begun.start, seconds=begun.seconds)
    device = begun.device
    target = target_of(device, _table(opened, device) if options.table is None else options.table)
    target = target._replace(tp=among.size)
    if not has_library:
        target = target._replace(kinds=target.kinds - {"library"})
    graph = bind_world(opened.graph, Placement(among.rank, among.size, ep, device))
    graph = msgspec.structs.replace(graph, caches=caches.with_slabs(graph.caches))
    sizing.check_limits(graph, limits)
    BatchInputs(graph)  # refuses a graph without logits, and one that no step's inputs can be made for
    try:
        note = ""
        if layer is None:
            layer, note = _native_layer(opened, target, options, rules, ranks, ep)
        ring = Ring(device)
        planned = weights.planned(graph, opened.manifest.checkpoint, files)
        connection = drawing = None
        if together is not None:
            connection = _connected(opened, target, planned, device, *together)
            graph, drawing = _in_parts(graph, connection, limits)
        program, addresses = covered(graph, target, limits, connection.collectives if connection else None)
        drawn = _drawing_launches(graph, target, drawing)
        if gone := missing((*program.launches(), *drawn), layer):
            raise UnfitError(f"the native layer lacks {', '.join(gone)}", opened)
        if why := weights.uncovered(planned):
            raise UnfitError(why, opened)
        if connection is not None and connection.collectives.wants_nccl(graph):
            connection.connect_nccl()
    except NotCoveredError as error:
        raise UnfitError(str(error), opened) from None
    return _Prepared(opened, target, graph, limits, layer, note, program, addresses, planned, ring, connection, drawing)


def _connected(
    opened: Bundle, target: Target, planned: Planned, device: DriverDevice, ranks: Ranks, connected: list[Connection]
) -> Connection:
    """What connects the ranks, once they have compared what they are; it is in the list, too."""
    table = hashlib.sha256(msgspec.json.encode(target.table) + ",".join(sorted(target.kinds)).encode())
    facts = Facts(
        bundle=opened.digest, precast=version("precast"), torch="", device="driver", gpu=device.model,
        capability=target.text, choices=table.hexdigest()[:16], options=ranks.options, machine=machine(),
        host=socket.gethostname(), gpu_id=device.uuid, weights_bytes=weights.planned_bytes(planned),
        free_bytes=device.free_bytes(),
    )  # fmt: skip
    check_facts(ranks.side.gather("facts", facts))
    made = Connection(ranks.among, device, target, ranks.folder, ranks.exchange, seconds=ranks.side.timeouts.step)
    connected.append(made)
    ranks.side.at_failure(made.abort)
    ranks.side.at_leave(made.leave)
    ranks.side.at_left(made.close)
    return made


def _in_parts(graph: Graph, connection: Connection, limits: EngineLimits) -> tuple[Graph, PartDrawing | None]:
    """The graph with the logits of the rank's part of the vocabulary, and what draws from them; where that can be."""
    found = in_parts(graph) if connection.collectives.has_peers else None
    if found is None or logits_type(found.graph).dtype not in MACROS:
        return graph, None
    most_rows = min(limits.max_num_seqs, limits.max_num_tokens)
    among, width = connection.collectives.among, element_bytes(logits_type(found.graph).dtype)
    memory = connection.share(told_bytes(among.size, found.columns, width, most_rows))
    part = DrawnPart(among, found.size, found.columns)
    return found.graph, PartDrawing(part, most_rows, connection.limit, memory.by_name)


def _drawing_launches(graph: Graph, target: Target, drawing: PartDrawing | None) -> Iterator[tuple[Launch, str]]:
    """What steps launch beside the graph, of all numbers of rows that are drawn differently, each with its key."""
    for rows in [1] if drawing is None else rows_apart(drawing.most_rows):
        for each in beside_the_graph(graph, target, 1, rows, None if drawing is None else drawing.part):
            yield each.launch, each.key


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


def _native_layer(
    opened: Bundle, target: Target, options: LoadOptions, rules: Trust, ranks: Ranks | None, ep: int
) -> tuple[NativeLayer, str]:
    """The layer that is admitted, on all ranks, and by which rule. Raises UnfitError where none is."""
    agree = None if ranks is None else partial(agreed, ranks.side, rules=options.rules_text())
    chosen = choose(opened, target.text, allowed=options.native, trust=rules, world=(target.tp, ep), agree=agree)
    if chosen.layer is None:
        raise UnfitError(chosen.note, opened)
    if chosen.lacks:
        raise UnfitError(f"the native layer doesn't fit: {chosen.lacks}", opened)
    return chosen.layer, chosen.note


def _streamed(planned: Planned, graph: Graph, opened: Bundle, ring: Ring, timeline: Timeline) -> Mapping[str, Buffer]:
    with timeline.phase("weights") as phase:
        loaded = weights.load_weights(planned, graph, ring=ring)
        phase.bytes = loaded.bytes_read
        phase.counters = {"bytes_read": loaded.bytes_read, "bytes_needed": loaded.bytes_needed}
        return loaded.buffers | weights.constants(graph, opened.constants, ring.device)


def _pools(
    options: LoadOptions, timeline: Timeline, found: _Prepared, kernels: Kernels, tensors: Mapping[str, Buffer],
    native: Native, ranks: Ranks | None,
) -> DriverRunner:  # fmt: skip
    """The runner, with caches in what the weights have left."""
    graph, program, device, addresses = found.graph, found.program, found.ring.device, found.addresses
    with device.use(), timeline.phase("pools") as phase:
        sizes = () if options.capture == "off" else captured_sizes(graph, found.limits)
        held = hold(program, graph, addresses, most_sizes(graph, found.limits), device, found.drawing)

        def sized(limits: EngineLimits) -> ArenaSize:
            free = device.free_bytes() + held.activations.shape[0]
            return sizing.size_arena(
                graph, limits, device, free=free, captured_sizes=sizes, target=found.target, planned=addresses
            )

        size = sized(found.limits) if ranks is None else size_of_all(ranks.side, sized, found.limits)
        memory = CacheMemory(graph.caches, size.num_slabs, device)
        pages = {pool.pages: memory.num_pages[pool.name] for pool in memory.plan.pools}
        shared = found.connection.memory if found.connection else {}
        model = Model(
            program, graph, kernels, addresses, {**tensors, **memory.buffers, **shared}, held, pages, found.drawing
        )
        kind = DriverRunner if ranks is None else DriverRankRunner
        runner = kind(model, graph, memory, device, found.limits, native, captured_sizes=sizes)
        if ranks is not None:
            assert isinstance(runner, DriverRankRunner)
            runner.join(memory, ranks.side)
            ranks.side.share_orders(runner.max_order_bytes)
        phase.bytes, phase.counters = size.num_bytes, size.counters()
    return runner
