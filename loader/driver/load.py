"""A load without torch: context, native layer, weights and pools through the CUDA driver alone.

Weights are most of a start. So in front of their first byte comes only what can't do without: the context, the bundle,
which bytes go where; and what fits into the time that the driver takes for the context, in which the interpreter is
free: imports, and the checks of the graph. An import lets go of the interpreter at every file, and would wait for it
behind the threads that read each time. All else is made ready while weights stream (`precast.loader.driver.ready`), a
first step that nobody asked for included, as long as there are weights to wait for.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from precast.ir.artifact import Bundle
from precast.ir.bundle.trust import Trust
from precast.ir.graph.world import UNSHARDED
from precast.ir.native import NativeLayer
from precast.ir.waits import ended
from precast.ir.weights.checkpoint import CheckpointFiles
from precast.kernels.choices import records_of
from precast.kernels.sampling.limits import SAMPLE_VERSION
from precast.kernels.use import GPU
from precast.loader.collector import collector_held
from precast.loader.driver import param_plan, weights
from precast.loader.driver.context import Begun
from precast.loader.driver.device import DriverDevice
from precast.loader.driver.param_plan import Planned
from precast.loader.driver.shared_libraries import open_cublaslt
from precast.loader.driver.unfit import UnfitError
from precast.loader.driver.weights import Params, Ring
from precast.loader.native import Chosen, choose
from precast.loader.options import LoadOptions
from precast.loader.placement import bind_unverified
from precast.loader.timeline import Timeline
from precast.loader.turns import short_turns

if TYPE_CHECKING:
    from precast.loader.engine.engine import Engine


def load_with_driver(
    options: LoadOptions, timeline: Timeline, context: Future[Begun], *, layer: NativeLayer | None = None
) -> Engine:
    """See `precast.loader.load.load`. Raises UnfitError for a model that it doesn't run: where the bundle's layers or
    the checkpoint's tensors say so before a tensor is read, else while tensors are read, which ends them.

    `context` is under way while the bundle is opened. `layer`: where kernels are taken from, whoever made it; None:
    from one of the bundle's that is admitted.
    """
    folder = options.folder()
    with timeline.phase("bundle") as phase, collector_held():
        opened = options.bundle if isinstance(options.bundle, Bundle) else Bundle.open(options.bundle)
        if layer is None and not opened.native:
            raise UnfitError("the bundle has no native layer", opened)
        open_cublaslt()
        ring = Ring(context)
        rules = options.rules(opened)
        files = CheckpointFiles.open(folder)
        graph = bind_unverified(opened.graph, UNSHARDED)
        planned = param_plan.planned(graph, opened.manifest.checkpoint, files)
        if why := param_plan.uncovered(planned):
            raise UnfitError(why, opened)
        with timeline.phase("imports"):
            from precast.loader.driver import ready

            for op, version in (*opened.manifest.ops.items(), ("precast.sample", SAMPLE_VERSION)):
                records_of(op, version)
        graph = ready.checked(graph, options, opened)
        begun = ended(context)
        timeline.add("context", start=begun.start, seconds=begun.seconds)
        if layer is None:
            layer, phase.note = _native_layer(opened, begun.device, options, rules)
        if why := param_plan.lacking(planned, layer):
            raise UnfitError(why, opened)
        params = weights.placed(planned, graph, begun.device)
    with ThreadPoolExecutor(1, thread_name_prefix="precast-load") as pool, short_turns():
        streamed = pool.submit(streamed_params, planned, params, ring, begun.device, layer, timeline)
        try:
            runner = ready.runner_ready(
                options, timeline, opened, graph, layer, params.buffers, begun.device, streamed.done
            )
            ended(streamed)
        except BaseException:  # an interrupt too, which must not wait for all the bytes, or for a silent server
            folder.stop()
            raise
    runner.ring = ring
    if options.capture == "before":
        ready.capture_before(runner, timeline)
    return ready.engine_of(runner, options, timeline, opened)


def _native_layer(opened: Bundle, device: DriverDevice, options: LoadOptions, rules: Trust) -> tuple[NativeLayer, str]:
    """The layer that is admitted, and by which rule. Raises UnfitError where none is."""
    target = GPU._replace(capability=device.capability).text
    return admitted(opened, choose(opened, target, allowed=options.native, trust=rules))


def admitted(opened: Bundle, chosen: Chosen) -> tuple[NativeLayer, str]:
    """The layer that was chosen, and what there is to say of it. Raises UnfitError for none, and for one that lacks
    kernels of the world."""
    if chosen.layer is None:
        raise UnfitError(chosen.note, opened)
    if chosen.lacks:
        raise UnfitError(f"the native layer doesn't fit: {chosen.lacks}", opened)
    return chosen.layer, chosen.note


def streamed_params(
    planned: Planned, params: Params, ring: Ring, device: DriverDevice, layer: NativeLayer, timeline: Timeline
) -> None:
    """Read all bytes of the params into their places."""
    with timeline.phase("weights") as phase:
        phase.bytes = weights.stream(planned, params, ring, device, layer)
        phase.counters = {"bytes_read": phase.bytes, "bytes_needed": param_plan.bytes_needed(planned)}
        phase.note = ring.note
