"""A load without torch by one of several ranks of a host. Before a tensor is read, all have agreed that each runs the
model: they have compared what they are, and made the memory through which they add up.
"""

from __future__ import annotations

import hashlib
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import msgspec

from precast.ir.artifact import Bundle
from precast.ir.graph.logit_parts import in_parts
from precast.ir.graph.schema import Graph
from precast.ir.waits import ended
from precast.ir.weights.checkpoint import CheckpointFiles
from precast.ir.weights.tensorfile import element_bytes
from precast.kernels.collectives.launches import MACROS, Among
from precast.kernels.rounded.fusing import with_rounded_inputs
from precast.kernels.sampling.launches import told_bytes
from precast.kernels.step_launches import DrawnPart
from precast.kernels.use import Target
from precast.loader.collector import collector_held
from precast.loader.driver import on_host, param_plan, weights
from precast.loader.driver.connection import Connection
from precast.loader.driver.context import Begun
from precast.loader.driver.device import DriverDevice
from precast.loader.driver.load import admitted, streamed_params
from precast.loader.driver.model import PartDrawing, logits_type
from precast.loader.driver.param_plan import Planned
from precast.loader.driver.rank_runner import DriverRankRunner
from precast.loader.driver.ready import Runnable, as_launches, check_files, kernels_of, pools, target_of, with_slabs
from precast.loader.driver.unfit import UnfitError
from precast.loader.driver.weights import Ring
from precast.loader.native import choose
from precast.loader.options import LoadOptions
from precast.loader.placement import Placement, bind_world
from precast.loader.sizing import EngineLimits
from precast.loader.timeline import Timeline
from precast.loader.turns import short_turns
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


class Loaded(NamedTuple):
    """What a rank runs."""

    bundle: Bundle
    runner: DriverRankRunner


class _Prepared(NamedTuple):
    """A model that the driver runs, before a tensor is read. `note`: where its kernels come from."""

    opened: Bundle
    model: Runnable
    planned: Planned
    device: DriverDevice
    note: str


def load_rank(options: LoadOptions, timeline: Timeline, context: Future[Begun], ranks: Ranks) -> Loaded:
    """Everything up to the first step, of one rank. Raises what `load_with_driver` raises; UnfitError on all ranks
    where it is one's, before a tensor is read."""
    folder = options.folder()
    with timeline.phase("bundle") as phase, collector_held():
        ring = Ring(context)
        opened, model, planned, device, phase.note = _prepared_together(options, timeline, context, ranks)
        check_files(options, opened)
        params = weights.placed(planned, model.graph, device)
    with ThreadPoolExecutor(1, thread_name_prefix="precast-load") as pool, short_turns():
        streamed = pool.submit(streamed_params, planned, params, ring, device, model.layer, timeline)
        try:
            with device.use(), timeline.phase("launches"), collector_held():
                kernels = kernels_of(model, device)
            ended(streamed)
        except BaseException:  # an interrupt too, which must not wait for a server that says nothing
            folder.stop()
            raise
    with device.use():
        tensors = {**params.buffers, **on_host.constants(model.graph, opened.constants, device)}
        agree = partial(size_of_all, ranks.side)
        runner = pools(model, kernels, tensors, options, timeline, device, kind=DriverRankRunner, agree=agree)
    assert isinstance(runner, DriverRankRunner)
    runner.join(ranks.side)
    ranks.side.share_orders(runner.max_order_bytes)
    return Loaded(opened, runner)


def _prepared_together(options: LoadOptions, timeline: Timeline, context: Future[Begun], ranks: Ranks) -> _Prepared:
    """`_prepared` on all ranks, or UnfitError on all, with what each says."""
    found, why = None, ""
    connected: list[Connection] = []
    opened = options.bundle if isinstance(options.bundle, Bundle) else None
    try:
        found = _prepared(options, timeline, context, ranks, connected)
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
    options: LoadOptions, timeline: Timeline, context: Future[Begun], ranks: Ranks, connected: list[Connection]
) -> _Prepared:
    """A model made ready for its weights; what connects the ranks is in the list, too."""
    opened = options.bundle if isinstance(options.bundle, Bundle) else Bundle.open(options.bundle)
    among, rules = ranks.among, options.rules(opened)
    limits = options.limits(opened.manifest.model.max_seq_len)
    if not opened.native:
        raise UnfitError("the bundle has no native layer", opened)
    files = CheckpointFiles.open(options.folder())
    begun = ended(context)
    timeline.add("context", start=begun.start, seconds=begun.seconds)
    device = begun.device
    target = target_of(device, opened, options)._replace(tp=among.size)
    graph = with_slabs(bind_world(opened.graph, Placement(among.rank, among.size, ranks.ep, device)), limits)
    graph = with_rounded_inputs(graph, target)
    agree = partial(agreed, ranks.side, rules=options.rules_text())
    world = (among.size, ranks.ep)
    chosen = choose(opened, target.text, allowed=options.native, trust=rules, world=world, agree=agree)
    layer, note = admitted(opened, chosen)
    planned = param_plan.planned(graph, opened.manifest.checkpoint, files)
    connection = _connected(opened, target, planned, device, ranks, connected)
    graph, drawing = _in_parts(graph, connection, limits)
    model = as_launches(graph, target, opened, layer, limits, connection, drawing)
    if why := param_plan.uncovered(planned) or param_plan.lacking(planned, layer):
        raise UnfitError(why, opened)
    if connection.collectives.wants_nccl(graph):
        connection.connect_nccl()
    return _Prepared(opened, model, planned, device, note)


def _connected(
    opened: Bundle, target: Target, planned: Planned, device: DriverDevice, ranks: Ranks, connected: list[Connection]
) -> Connection:
    """What connects the ranks, once they have compared what they are."""
    table = hashlib.sha256(msgspec.json.encode(target.table) + ",".join(sorted(target.kinds)).encode())
    facts = Facts(
        bundle=opened.digest, precast=version("precast"), torch="", device="driver", gpu=device.model,
        capability=target.text, choices=table.hexdigest()[:16], options=ranks.options, machine=machine(),
        host=socket.gethostname(), gpu_id=device.uuid, weights_bytes=param_plan.planned_bytes(planned),
        free_bytes=device.free_bytes(),
    )  # fmt: skip
    check_facts(ranks.side.gather("facts", facts))
    made = Connection(ranks.among, device, target, ranks.folder, ranks.exchange, seconds=ranks.side.timeouts.kernel)
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
