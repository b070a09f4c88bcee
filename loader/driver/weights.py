"""A checkpoint's tensors into the params of a graph, without torch: the same read plan, through pinned memory.

Bytes that stand in a file as they will stand in memory are read into pinned buffers and copied from there. A param that
takes more (transposed, short rows, another element type) is made on the host by numpy (`on_host`), which is imported
only where some need it: that takes a while. What is read where is planned before (`param_plan`).
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from precast.ir.errors import TargetError
from precast.ir.graph.schema import Graph, Recipe, Tie
from precast.ir.memory.strides import contiguous
from precast.ir.native import NativeLayer
from precast.ir.weights import scales
from precast.ir.weights.sources import Source
from precast.loader.device import Buffer, Event, aligned, host_bytes
from precast.loader.driver import library
from precast.loader.driver.context import Begun
from precast.loader.driver.copies import Copies
from precast.loader.driver.device import DriverDevice
from precast.loader.driver.param_plan import (
    BUFFER_BYTES,
    PARAM_ALIGNMENT,
    Made,
    Planned,
    made_where,
    read_plan,
    target_bytes,
)
from precast.loader.weights.files import Range, read_ranges
from precast.loader.weights.jobs import Worker, share
from precast.loader.weights.parts import Target
from precast.loader.weights.read_plan import Job
from precast.loader.weights.stored_checks import Check, Fault

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from precast.loader.driver.on_host import OnHost
    from precast.loader.driver.quantise_plan import Round

THREADS = 12
"""They read the page cache faster than the bus takes it."""


class NothingMade(dict[int, "npt.NDArray[np.uint8]"]):
    """No target is made on the host."""

    targets: Collection[int] = ()

    def done(self, job: Job, stream: int | None) -> None:
        """There is nothing to bring to the device."""


class Ring:
    """Pinned memory for what goes to a GPU, a part for each thread. A thread of its own takes it from the system while
    the context is made, and pins it as soon as that is there: it is ready when the first byte is read.

    What the driver allocates itself it takes from the system when it is asked, and whoever else in this process wants
    memory waits meanwhile. To pin what is there takes a fraction of that.

    Where the host has not so much to pin, the ring is smaller, and fewer threads read; `note` says so then.
    """

    def __init__(self, context: Future[Begun]) -> None:
        """`context`: the device, once its context is made."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="precast-pinning")
        self._pinned: Future[list[Buffer]] = pool.submit(_pinned_parts, context)
        pool.shutdown(wait=False)

    def parts(self) -> list[Buffer]:
        """The threads' buffers, once they are pinned. Raises TargetError (`host-memory`) where none could be."""
        return list(self._pinned.result())

    @property
    def note(self) -> str:
        """What is to be said of it; empty if nothing is."""
        count = len(self._pinned.result())
        return "" if count == THREADS else f"the host pins no more than {count} of {THREADS} buffers"

    def give_back(self) -> None:
        """Let the memory go, by a thread of its own."""
        threading.Thread(target=self._pinned.result().clear, name="precast-unpinning").start()


def _pinned_parts(context: Future[Begun]) -> list[Buffer]:
    """`THREADS` pinned buffers of `BUFFER_BYTES`, or as large a part of them as the host pins.

    Raises TargetError (`host-memory`) where it pins not even one.
    """
    count = THREADS
    memory = _touched(count * BUFFER_BYTES)
    device = context.result().device
    if memory is not None:
        with suppress(library.DriverError):  # some systems pin the driver's own memory alone
            return _parts(device.pin(memory))
    del memory
    while count:
        try:
            return _parts(device.alloc(count * BUFFER_BYTES, pinned=True))
        except library.DriverError as error:
            if not device.is_out_of_memory(error):
                raise
            count //= 2
    fix = "free memory of the host, or raise what this process may lock (`ulimit -l`, a container's memory limit)"
    raise TargetError("host-memory", f"the host pins not even {BUFFER_BYTES >> 20} MiB of memory", fix=fix)


def _touched(num_bytes: int) -> mmap.mmap | None:
    """Memory whose pages are there; None where there is not so much."""
    try:
        memory = mmap.mmap(-1, num_bytes)
    except OSError:
        return None
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 0, num_bytes)  # other threads run meanwhile
    return memory


def _parts(ring: Buffer) -> list[Buffer]:
    return [ring.view(start, (BUFFER_BYTES,)) for start in range(0, ring.shape[0], BUFFER_BYTES)]


class Params(NamedTuple):
    """Where the params lie: all of them, the address of each target that is one, and those of the graph by name.

    `zeroed` is passed once there are zeros in all of it: until their bytes come, params are numbers. `rounds`: what is
    quantised while it is read.
    """

    memory: Buffer
    at: Mapping[int, int]
    buffers: Mapping[str, Buffer]
    zeroed: Event
    rounds: Rounds | None = None


class Rounds(NamedTuple):
    """Rounds of matrices that are quantised, memory for the largest of them and, from `scratch` on, for a result."""

    each: list[Round]
    memory: Buffer
    scratch: int


def placed(what: Planned, graph: Graph, device: DriverDevice) -> Params:
    """Memory for all params. Raises TargetError (device-memory) if they don't fit."""
    targets = what.plan.targets
    places, total = _in_a_row([i for i, target in enumerate(targets) if target.name is not None], targets)
    rounds, room, scratch = _rounds(what)
    if total + room + scratch > (free := device.free_bytes()):
        more = f", {(room + scratch) / 1e9:.2f} GB what is quantised while it is read" if room else ""
        message = f"the params take {total / 1e9:.2f} GB{more}, and {free / 1e9:.2f} GB are free"
        raise TargetError("device-memory", message, where=device.name, fix="free memory, or use a device with more")
    memory, zeroed = device.alloc(total), device.event()
    with device.use():
        device.zero(memory)
        zeroed.record()
    buffers = {
        target.name: memory.view(places[i], target.shape, strides=contiguous(target.shape).strides, dtype=target.dtype)
        for i, target in enumerate(targets)
        if target.name is not None
    }
    recipe_of = {param.name: param.recipe for param in graph.params}
    named = {param.name: buffers[_made_name(param.name, recipe_of)] for param in graph.params}
    at = {i: memory.pointer + start for i, start in places.items()}
    return Params(memory, at, named, zeroed, Rounds(rounds, device.alloc(room + scratch), room) if rounds else None)


def _rounds(what: Planned) -> tuple[list[Round], int, int]:
    """Of what is quantised while it is read: the rounds, the bytes of the largest, and those of a result."""
    if not what.assembly.computed:
        return [], 0, 0
    from precast.loader.driver import quantise_plan

    rounds = list(quantise_plan.rounds(what.assembly.computed, what.stored))
    sizes = (_in_a_row(range(len(each.assembly.targets)), each.assembly.targets)[1] for each in rounds)
    return rounds, max(sizes), quantise_plan.scratch_bytes(what.assembly.computed)


def _in_a_row(chosen: Iterable[int], targets: Sequence[Target]) -> tuple[dict[int, int], int]:
    """Where each of some targets begins in memory that has all of them, and the bytes of that."""
    places, total = {}, 0
    for i in chosen:
        places[i] = total
        total += aligned(target_bytes(targets[i]), PARAM_ALIGNMENT)
    return places, total


def stream(what: Planned, params: Params, ring: Ring, device: DriverDevice, layer: NativeLayer) -> int:
    """Bring all params to their places; the bytes that were read. Kernels of the layer copy what they can.

    Raises WeightsError (checkpoint-read) for a file that can't be read to its end or whose folder is stopped,
    (checkpoint-changed) for one that somebody writes to, (weights-mismatch) for scales of weights that are no numbers,
    (scale-invalid) for scales of caches that are no numbers above 0.
    """
    num_bytes = _brought(what, params, ring, device, layer)
    with device.use():
        if what.assembly.computed:
            num_bytes += _quantised(what, params, ring, device, layer)
        for target, value in what.assembly.filled.items():
            number = ctypes.c_float(value)
            library.call("cuMemcpyAsync", params.at[target], ctypes.addressof(number), 4, None)
            library.call("cuStreamSynchronize", None)
        library.call("cuStreamSynchronize", None)
        found = {name: _number_at(params.buffers[name].pointer) for name in what.scales}
        scales.check(found, what.files.folder.name)
    return num_bytes


def _brought(what: Planned, params: Params, ring: Ring, device: DriverDevice, layer: NativeLayer) -> int:
    """Bring all that is read, and not computed, to its places; the bytes that were read."""
    copies = Copies(what, layer, device) if what.on_device else None
    if copies is not None:
        what = what._replace(on_host=what.on_host - copies.targets)
    made = _made(what, params)
    parts = ring.parts()
    threads = min(what.files.folder.readers or len(parts), len(parts))
    num_bytes = share(
        what.plan.jobs, lambda: _worker(what, params, made, device, parts.pop(), copies), threads, what.files
    )
    if not isinstance(made, NothingMade):
        with device.use(), _blaming(what):
            made.move_all()
    return num_bytes


def _quantised(what: Planned, params: Params, ring: Ring, device: DriverDevice, layer: NativeLayer) -> int:
    """Make what is quantised while it is read, and look at its scales; the bytes that were read."""
    from precast.loader.driver.quantising import Quantising

    assert params.rounds is not None, "placed"
    computed, stored, (rounds, memory, scratch) = what.assembly.computed, what.stored, params.rounds
    kernels, num_bytes = Quantising(computed, stored, layer, device, memory.pointer + scratch), 0
    for each in rounds:
        plan = read_plan(each.assembly, stored, what.files)
        places, _ = _in_a_row(range(len(plan.targets)), plan.targets)
        at = {i: memory.pointer + start for i, start in places.items()}
        on_host, on_device = made_where(plan, at.keys())
        read = Planned(each.assembly, plan, on_host, what.files, stored=stored, on_device=on_device)
        num_bytes += _brought(read, Params(memory, at, {}, params.zeroed), ring, device, layer)
        kernels.make(each, at, params.at)
        library.call("cuStreamSynchronize", None)
    with _blaming(what):
        for target in {each.target for each in computed} & what.checks.keys():
            _check_there(what.checks, target, params.at[target], target_bytes(what.plan.targets[target]))
    return num_bytes


def _check_there(checked: Mapping[int, Check], target: int, address: int, size: int) -> None:
    """Raise Fault where a target on the device isn't what it must be."""
    from precast.loader.driver.on_host import check_bytes

    here = bytearray(size)
    library.call("cuMemcpyAsync", ctypes.addressof(ctypes.c_char.from_buffer(here)), address, size, None)
    library.call("cuStreamSynchronize", None)
    check_bytes(checked, target, memoryview(here))


@contextmanager
def _blaming(what: Planned) -> Iterator[None]:
    """Says of a fault which tensor it is in: by the thread that finds it, as no file is read after its error."""
    try:
        yield
    except Fault as fault:
        from precast.loader.weights.faults import refusal

        raise refusal(fault.check, what.files, what.stored) from None


def _number_at(address: int) -> float:
    """The float32 number at an address of the device, whose work is done."""
    found = ctypes.c_float()
    library.call("cuMemcpyAsync", ctypes.addressof(found), address, 4, None)
    library.call("cuStreamSynchronize", None)
    return found.value


def _made(what: Planned, params: Params) -> OnHost | NothingMade:
    if not what.on_host:
        return NothingMade()
    from precast.loader.driver.on_host import OnHost

    return OnHost(what, params.at)


@contextmanager
def _worker(
    what: Planned, params: Params, made: OnHost | NothingMade, device: DriverDevice, buffer: Buffer,
    copies: Copies | None,
) -> Iterator[Worker]:  # fmt: skip
    """Reads into a pinned buffer, and leaves the rest to the device; its stream has run dry at the end."""
    with device.use():
        stream, emptied, view = device.stream(), device.event(), host_bytes(buffer)
        params.zeroed.wait(stream)

        def run(job: Job, source: Source) -> int:
            library.call("cuEventSynchronize", emptied.handle)  # type: ignore[attr-defined]
            with _blaming(what):
                num_bytes = do_job(job, source, buffer.pointer, view, params.at, made, stream, what.checks, copies)
                emptied.record(stream)
                made.done(job, stream)
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
    made: Made,
    stream: int,
    checked: Mapping[int, Check] = MappingProxyType({}),
    copies: Copies | None = None,
) -> int:
    """Read a job's bytes, where they belong or through pinned memory, and make its copies; how many were read.

    Targets are made on the host (`made`), or are on the device (`at` these addresses). There `stream` brings them from
    `pinned` memory, which is seen by `view`, or `copies` read it; what of them is to be `checked`, it checks there.
    """
    on_device = [copy for copy in job.copies if copy.target not in made.targets]
    used = job.buffer_bytes if on_device else 0  # of pinned memory, before what is on its way to targets
    through = sum(each.num_bytes for each in job.ranges if each.target is not None and each.target not in made.targets)
    room: Buffer | None = None
    large = bytearray()
    if used + through > len(view):  # rare: rows that no job holds whole, or tensors that are needed in two ways
        if copies is not None and on_device:
            room = copies.room(used + through)
            pinned, view = room.pointer, host_bytes(room)
        else:
            large = bytearray(through)
            pinned, view = ctypes.addressof(ctypes.c_char.from_buffer(large)), memoryview(large)
    staged = view[:used] if on_device else memoryview(bytearray(job.buffer_bytes))
    ranges: list[Range] = []
    seen: list[tuple[int, int, int]] = []  # targets that are checked, and their bytes here
    uploads: list[tuple[int, int, int]] = []  # addresses there and here, and bytes
    for each in job.ranges:
        for start, length, offset in each.each():
            if each.target is None:
                ranges.append(Range(start, staged[offset : offset + length]))
            elif each.target in made.targets:
                ranges.append(Range(start, made[each.target].data[offset : offset + length]))
            else:
                ranges.append(Range(start, view[used : used + length]))
                seen += [(each.target, used, length)] if each.target in checked else []
                address = at[each.target] + offset
                if uploads and uploads[-1][0] + uploads[-1][2] == address:
                    uploads[-1] = uploads[-1][0], uploads[-1][1], uploads[-1][2] + length
                else:
                    uploads.append((address, pinned + used, length))
                used += length
    num_bytes = read_ranges(source, ranges)
    if seen:
        from precast.loader.driver.on_host import check_bytes

        for target, place, length in seen:
            check_bytes(checked, target, view[place : place + length])
    for address, here, length in uploads:
        library.call("cuMemcpyAsync", address, here, length, stream)
    for copy in on_device:
        assert copies is not None, "what isn't made on the host is copied there"
        copies.put(copy, pinned, at[copy.target], stream)
    if large or room:
        library.call("cuStreamSynchronize", stream)  # its memory is gone afterwards
    if job.copies and (len(on_device) < len(job.copies) or not checked.keys().isdisjoint(c.target for c in on_device)):
        from precast.loader.driver.on_host import check_copy, put_copy

        for copy in job.copies:
            if copy.target in made.targets:
                put_copy(copy, staged, made)
            else:
                check_copy(checked, copy, staged)
    return num_bytes


def _made_name(name: str, recipe_of: Mapping[str, Recipe]) -> str:
    """The param whose memory the one called `name` has: its own, or that of the one that it is tied to."""
    recipe = recipe_of[name]
    return _made_name(recipe.param, recipe_of) if isinstance(recipe, Tie) else name
