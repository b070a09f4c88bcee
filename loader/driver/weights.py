"""A checkpoint's tensors into the params of a graph, without torch: the same read plan, through pinned memory.

Bytes that stand in a file as they will stand in memory are read into pinned buffers and copied from there. A param that
takes more (transposed, short rows, another element type) is made on the host by numpy, and uploaded when all is read.
Values of quantised tensors are not computed here (`uncovered`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from precast.ir.errors import TargetError
from precast.ir.graph.schema import Dtype, Graph, Recipe, Tie
from precast.ir.manifest import Checkpoint
from precast.ir.memory.strides import contiguous
from precast.ir.weights import recipes
from precast.ir.weights.checkpoint import CheckpointFiles
from precast.ir.weights.sources import Source
from precast.ir.weights.tensorfile import element_bytes
from precast.loader.device import Buffer, aligned, host_bytes
from precast.loader.driver import library
from precast.loader.driver.device import DriverDevice
from precast.loader.weights.files import Range, read_ranges
from precast.loader.weights.jobs import Worker, share
from precast.loader.weights.parts import Assembly, Casts, param_parts
from precast.loader.weights.read_plan import DEFAULT_SIZES, REMOTE_SIZES, Copy, Job, Plan, plan_reads
from precast.loader.weights.views import View

if TYPE_CHECKING:
    import numpy.typing as npt

THREADS = 12
"""They read the page cache faster than the bus takes it."""
BUFFERS_A_THREAD, BUFFER_BYTES = 1, 16 << 20
"""While one thread's buffer is on its way, others read. Smaller buffers keep Python busy, more take longer to pin."""
PARAM_ALIGNMENT = 256
"""Where params begin, in bytes."""

_NUMPY: Mapping[str, str] = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"}
"""What holds the elements of types that numpy doesn't have."""
_CONVERTED = frozenset(("float16", "bfloat16", "float32", "float64"))
"""Types that are converted here, from each to each."""


class Planned(NamedTuple):
    """How params are read from the files of a checkpoint: the plan, and which of its targets are made on the host."""

    assembly: Assembly
    plan: Plan
    on_host: frozenset[int]
    files: CheckpointFiles


class Weights(NamedTuple):
    """The params by name, and what it took to load them, as `precast.loader.weights.stream.Weights` says it."""

    buffers: dict[str, Buffer]
    bytes_read: int
    bytes_needed: int


def planned(graph: Graph, rules: Checkpoint, files: CheckpointFiles) -> Planned:
    """The plan for all params of a verified graph that is bound to its rank.

    Raises WeightsError (weights-mismatch) with everything that doesn't fit.
    """
    stored = recipes.require(graph, rules, files)
    assembly = param_parts(graph.params, lambda name: stored[name].dtype)
    sizes = DEFAULT_SIZES if files.folder.readers is None else REMOTE_SIZES
    plan = plan_reads(assembly, stored.__getitem__, msgspec.structs.replace(sizes, job=BUFFER_BYTES))
    on_host = {copy.target for job in plan.jobs for copy in job.copies}
    on_host |= {target for move in plan.moves for target in (move.source, move.target)}
    return Planned(assembly, plan, frozenset(on_host), files)


def planned_bytes(what: Planned) -> int:
    """The memory that all params take."""
    return sum(
        aligned(math.prod(target.shape) * element_bytes(target.dtype), PARAM_ALIGNMENT)
        for target in what.plan.targets
        if target.name is not None
    )


def uncovered(what: Planned) -> str:
    """Why params aren't made here; empty if they are."""
    if what.assembly.computed:
        return f"the checkpoint's tensors are quantised ({what.assembly.computed[0].recipe.format})"
    for copy in (copy for job in what.plan.jobs for copy in job.copies):
        odd = sorted({copy.dtype, *copy.casts} - _CONVERTED) if copy.casts else []
        if odd:
            return f"the checkpoint's tensors are converted from {copy.dtype} to {' to '.join(copy.casts)}"
    return ""


class Ring:
    """Pinned memory for what goes to a GPU, a part for each thread. It is pinned by a thread of its own: begun when the
    context is there, it is ready when the first byte is read."""

    def __init__(self, device: DriverDevice) -> None:
        self.device = device
        pool = ThreadPoolExecutor(1, thread_name_prefix="precast-pinning")
        size = THREADS * BUFFERS_A_THREAD * BUFFER_BYTES
        self._pinned: Future[Buffer] = pool.submit(device.alloc, size, pinned=True)
        pool.shutdown(wait=False)

    def parts(self) -> list[list[Buffer]]:
        """The buffers of each thread, once they are pinned."""
        all_of_it = self._pinned.result()
        each = [all_of_it.view(i * BUFFER_BYTES, (BUFFER_BYTES,)) for i in range(THREADS * BUFFERS_A_THREAD)]
        return [each[i : i + BUFFERS_A_THREAD] for i in range(0, len(each), BUFFERS_A_THREAD)]


def load_weights(what: Planned, graph: Graph, *, ring: Ring) -> Weights:
    """All params, on the ring's device.

    Raises WeightsError (checkpoint-read) for a file that can't be read to its end, (checkpoint-changed) for one that
    somebody writes to; TargetError (device-memory) if the params don't fit.
    """
    device, plan = ring.device, what.plan
    sizes = [math.prod(target.shape) * element_bytes(target.dtype) for target in plan.targets]
    places, total = {}, 0
    for i, target in enumerate(plan.targets):
        if target.name is not None:
            places[i] = total
            total += aligned(sizes[i], PARAM_ALIGNMENT)
    if total > (free := device.free_bytes()):
        message = f"the params take {total / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free"
        raise TargetError("device-memory", message, where=device.name, fix="free memory, or use a device with more")
    memory = device.alloc(total)
    made = {i: np.empty(sizes[i], np.uint8) for i in what.on_host}
    parts = ring.parts()
    at = {i: memory.pointer + start for i, start in places.items()}
    threads = min(what.files.folder.readers or THREADS, THREADS)
    num_bytes = share(plan.jobs, lambda: _worker(at, made, device, parts.pop()), threads, what.files)
    move_all(plan, made)
    with device.use():
        for i in sorted(what.on_host & places.keys()):
            _upload(at[i], made[i])
        device.synchronize()
    buffers = {
        target.name: memory.view(places[i], target.shape, strides=contiguous(target.shape).strides, dtype=target.dtype)
        for i, target in enumerate(plan.targets)
        if target.name is not None
    }
    recipe_of = {param.name: param.recipe for param in graph.params}
    named = {param.name: buffers[_made_name(param.name, recipe_of)] for param in graph.params}
    return Weights(named, num_bytes, plan.bytes_needed)


def move_all(plan: Plan, made: Mapping[int, npt.NDArray[np.uint8]]) -> None:
    """Move what is in temporary targets to where it belongs, in the plan's order; both are on the host."""
    for move in plan.moves:
        dtype = plan.targets[move.source].dtype
        put(_seen(made[move.source], dtype), move.view, dtype, made[move.target], move.destination, ())


def constants(graph: Graph, given: Mapping[str, Any], device: DriverDevice) -> dict[str, Buffer]:
    """A bundle's constants by name, on the device. They have the types that the graph declares."""
    found = {}
    for value in graph.constants:
        dtype, shape, data = given[value.name]
        memory = device.alloc(max(len(data), 1))
        with device.use():
            _upload(memory.pointer, np.frombuffer(data, np.uint8))
            device.synchronize()
        found[value.name] = memory.view(0, tuple(shape), strides=contiguous(shape).strides, dtype=dtype)
    return found


def _upload(address: int, data: npt.NDArray[np.uint8]) -> None:
    """Copy bytes of the host to the device; what they are may change only when its work is done."""
    if len(data):
        library.call("cuMemcpyAsync", address, data.ctypes.data, len(data), None)


@contextmanager
def _worker(
    at: Mapping[int, int], made: Mapping[int, npt.NDArray[np.uint8]], device: DriverDevice, buffers: list[Buffer]
) -> Iterator[Worker]:
    """Reads into pinned buffers in turn, and leaves the rest to the device; its stream has run dry at the end."""
    with device.use():
        stream = device.stream()
        events = [device.event() for _ in buffers]
        views = [host_bytes(each) for each in buffers]
        turn = 0

        def run(job: Job, source: Source) -> int:
            nonlocal turn
            turn = (turn + 1) % len(buffers)
            library.call("cuEventSynchronize", events[turn].handle)  # type: ignore[attr-defined]
            num_bytes = do_job(job, source, buffers[turn].pointer, views[turn], at, made, stream)
            events[turn].record(stream)
            return num_bytes

        try:
            yield run
        finally:
            library.call("cuStreamSynchronize", stream)
            library.call("cuStreamDestroy_v2", stream)


def do_job(
    job: Job,
    source: Source,
    pinned: int,
    view: memoryview,
    at: Mapping[int, int],
    made: Mapping[int, npt.NDArray[np.uint8]],
    stream: int,
) -> int:
    """Read a job's bytes, where they belong or through pinned memory, and make its copies; how many were read.

    Targets are on the host (`made`), or on the device (`at` these addresses), where `stream` brings them from `pinned`
    memory, which is seen by `view`.
    """
    through = sum(each.num_bytes for each in job.ranges if each.target is not None and each.target not in made)
    large = np.empty(through if through > len(view) else 0, np.uint8)
    if len(large):  # rare: rows that no job holds whole
        pinned, view = large.ctypes.data, large.data
    staged = np.empty(job.buffer_bytes, np.uint8)
    ranges: list[Range] = []
    uploads: list[tuple[int, int, int]] = []  # addresses there and here, and bytes
    used = 0
    for each in job.ranges:
        for start, length, offset in each.each():
            if each.target is None:
                ranges.append(Range(start, staged.data[offset : offset + length]))
            elif each.target in made:
                ranges.append(Range(start, made[each.target].data[offset : offset + length]))
            else:
                ranges.append(Range(start, view[used : used + length]))
                address = at[each.target] + offset
                if uploads and uploads[-1][0] + uploads[-1][2] == address:
                    uploads[-1] = uploads[-1][0], uploads[-1][1], uploads[-1][2] + length
                else:
                    uploads.append((address, pinned + used, length))
                used += length
    num_bytes = read_ranges(source, ranges)
    for address, here, length in uploads:
        library.call("cuMemcpyAsync", address, here, length, stream)
    if len(large):
        library.call("cuStreamSynchronize", stream)  # its memory is gone afterwards
    for copy in job.copies:
        _copy(copy, staged, made)
    return num_bytes


def _copy(copy: Copy, staged: npt.NDArray[np.uint8], made: Mapping[int, npt.NDArray[np.uint8]]) -> None:
    flat = _seen(staged, copy.dtype)
    first = copy.offset // flat.itemsize
    source = copy.source._replace(offset=first + copy.source.offset)
    put(flat, source, copy.dtype, made[copy.target], copy.destination, copy.casts)


def put(
    flat: npt.NDArray[Any], view: View, dtype: Dtype, raw: npt.NDArray[np.uint8], destination: View, casts: Casts
) -> None:
    """Put the elements of `flat` that `view` describes, converted to each type of `casts` in turn, into a view of the
    target whose bytes are `raw`."""
    values = _strided(flat, view)
    for cast in casts:
        values, dtype = converted(values, dtype, cast), cast
    np.copyto(_strided(_seen(raw, dtype), destination), values)


def converted(values: npt.NDArray[Any], dtype: Dtype, to: Dtype) -> npt.NDArray[Any]:
    """Numbers of one floating type as those of another, rounded to the nearest, ties to even, as torch does.

    bfloat16 is held in uint16: the upper half of the float32 that has the same value.
    """
    if dtype == to:
        return values
    if dtype == "bfloat16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    if to != "bfloat16":
        with np.errstate(all="ignore"):  # infinities and NaN stay what they are
            return values.astype(to)
    with np.errstate(all="ignore"):
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(is_nan, np.uint32(0x7FC0), rounded).astype(np.uint16)


def _seen(raw: npt.NDArray[np.uint8], dtype: Dtype) -> npt.NDArray[Any]:
    """Bytes as elements of a type; those at the end that make no whole one are left out."""
    held = np.dtype(_NUMPY.get(dtype, dtype))
    return raw[: len(raw) // held.itemsize * held.itemsize].view(held)


def _strided(flat: npt.NDArray[Any], view: View) -> npt.NDArray[Any]:
    steps = [stride * flat.itemsize for stride in view.strides]
    return np.lib.stride_tricks.as_strided(flat[view.offset :], view.shape, steps)


def _made_name(name: str, recipe_of: Mapping[str, Recipe]) -> str:
    """The param whose memory the one called `name` has: its own, or that of the one that it is tied to."""
    recipe = recipe_of[name]
    return _made_name(recipe.param, recipe_of) if isinstance(recipe, Tie) else name
