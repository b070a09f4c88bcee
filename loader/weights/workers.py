"""The jobs of a read plan, shared among threads: on the host straight into place, to a GPU through pinned buffers."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, Self

import torch

from precast.ir.weights.checkpoint import CheckpointFiles
from precast.ir.weights.sources import Source
from precast.kernels import dtypes
from precast.loader.device import Device, Event
from precast.loader.torch_device import tensor_of
from precast.loader.weights.files import Range, read_ranges
from precast.loader.weights.jobs import Worker, share, through_buffer
from precast.loader.weights.parts import Casts
from precast.loader.weights.read_plan import DEFAULT_SIZES, Copy, Job, Plan
from precast.loader.weights.repacked import repacked
from precast.loader.weights.views import View

MAX_HOST_THREADS = 16
THREADS_A_CORE = 2
"""On a CPU: while one waits for the disk, the other copies."""
DEVICE_THREADS = 8
"""For a GPU: together they read the page cache as fast as the bus takes it."""
NUM_BUFFERS = 2 * DEVICE_THREADS
"""Two a thread: one is read into while the other is on its way to the device. More threads, which wait for a server,
have one each.
"""
BUFFER_BYTES = DEFAULT_SIZES.job
"""128 MiB for all threads: larger ones take longer to pin, smaller ones keep Python busy."""


def read_all(plan: Plan, memory: Sequence[torch.Tensor], buffers: PinnedBuffers, checkpoint: CheckpointFiles) -> int:
    """Do the jobs of `plan`, of files of `checkpoint`; the bytes read. `memory` holds the bytes of each target, uint8.

    `buffers` are those of the device that `memory` is on. Raises WeightsError.
    """
    device, readers = buffers.device, checkpoint.folder.readers
    if device.kind == "cpu":
        # The cores that this process may use, where the system tells.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = readers or min(MAX_HOST_THREADS, THREADS_A_CORE * cores)
        return share(plan.jobs, lambda: _host_worker(plan, memory), threads, checkpoint)
    # The memory may have been in use before, by work that the current stream has not finished.
    ready = device.event()
    ready.record()
    threads = min(readers or DEVICE_THREADS, NUM_BUFFERS)
    each = NUM_BUFFERS // max(threads, DEVICE_THREADS)
    num_bytes = share(plan.jobs, lambda: _device_worker(memory, buffers, ready, each), threads, checkpoint)
    if any(job.copies for job in plan.jobs):
        # torch keeps what a worker's stream allocated for copies for that stream, which is gone.
        torch.cuda.empty_cache()
    return num_bytes


def move_all(plan: Plan, memory: Sequence[torch.Tensor]) -> None:
    """Move what is in temporary targets to where it belongs, in the plan's order."""
    for move in plan.moves:
        source = memory[move.source].view(dtypes.BY_NAME[plan.targets[move.source].dtype])
        copy_converted(strided(source, move.view), memory[move.target], move.destination)


@contextmanager
def _host_worker(plan: Plan, memory: Sequence[torch.Tensor]) -> Iterator[Worker]:
    """Reads into the targets, and into a buffer what has to be copied from there."""
    views = [raw.numpy().data for raw in memory]
    buffer = torch.empty(max(job.buffer_bytes for job in plan.jobs), dtype=torch.uint8)
    buffer_view = buffer.numpy().data

    def ranges_of(job: Job) -> Iterator[Range]:
        for ranges in job.ranges:
            view = buffer_view if ranges.target is None else views[ranges.target]
            for start, length, offset in ranges.each():
                yield Range(start, view[offset : offset + length])

    def run(job: Job, source: Source) -> int:
        num_bytes = read_ranges(source, ranges_of(job))
        for copy in job.copies:
            apply_copy(copy, buffer, memory)
        return num_bytes

    yield run


# --- a GPU -------------------------------------------------------------------------------------------------------


class _Pinned(NamedTuple):
    """Pinned bytes, the same as a memoryview, and when the device has taken them."""

    raw: torch.Tensor
    view: memoryview
    emptied: Event


class PinnedBuffers:
    """Buffers for what goes to a GPU, pinned one after the other by a thread of their own; for a CPU there are none.

    Pinning takes as long as moving 20 times as many bytes to the device, and the driver lets no copy begin meanwhile.
    So it is best begun early: made when the device's context is there, these are ready when the first byte is read.
    On leaving the context no more of them are pinned, and those that nobody took are freed. Where the host pins no
    more, the rest is other memory, which copies take longer from; the log says so.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._pinned: deque[Future[_Pinned]] = deque()
        self._has_warned = False
        if device.kind == "cuda":
            pool = ThreadPoolExecutor(1, thread_name_prefix="precast-pinning")
            self._pinned.extend(pool.submit(self._pin) for _ in range(NUM_BUFFERS))
            pool.shutdown(wait=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        while self._pinned:
            self._pinned.popleft().cancel()

    def take(self) -> _Pinned:
        """The next buffer, once it is pinned."""
        return self._pinned.popleft().result()

    def give_back(self, buffer: _Pinned) -> None:
        """Take a buffer back that nothing is on its way from any more."""
        free: Future[_Pinned] = Future()
        free.set_result(buffer)
        self._pinned.append(free)

    def _pin(self) -> _Pinned:
        with self.device.use():
            try:
                raw = tensor_of(self.device.alloc(BUFFER_BYTES, pinned=True))
            except RuntimeError as error:  # torch has no class of its own for memory of the host
                if "out of memory" not in str(error):
                    raise
                raw = torch.empty(BUFFER_BYTES, dtype=torch.uint8)
                if not self._has_warned:
                    self._has_warned = True
                    message = (
                        "warning: the host pins no more memory: weights pass through other memory, and take longer"
                    )
                    logging.getLogger("precast").warning(message)
            return _Pinned(raw, raw.numpy().data, self.device.event())


@contextmanager
def _device_worker(
    memory: Sequence[torch.Tensor], buffers: PinnedBuffers, ready: Event, num_buffers: int
) -> Iterator[Worker]:
    """Reads into so many pinned buffers in turn, and leaves the rest to the device: copies to it, and copies on it.

    All of it goes to a stream of the thread's own, which has run dry at the end, also after an error: the memory may be
    gone afterwards.
    """
    device = buffers.device
    stream, done = device.stream(), device.event()
    taken: deque[_Pinned] = deque()

    def next_buffer() -> _Pinned:
        """A buffer that is on its way to nowhere: a new one, or the one that has been on its way for the longest."""
        if len(taken) < num_buffers:
            taken.append(buffers.take())
        else:
            taken.rotate(-1)
            taken[-1].emptied.synchronize()
        return taken[-1]

    with device.use(stream):
        ready.wait(stream)
        try:
            yield lambda job, source: _run_on_device(job, source, next_buffer(), memory, device)
        finally:
            done.record()
            done.synchronize()
            for buffer in taken:
                buffers.give_back(buffer)


def _run_on_device(job: Job, source: Source, buffer: _Pinned, memory: Sequence[torch.Tensor], device: Device) -> int:
    """Read the job's bytes and queue what the device has to do with them.

    What Python does for a job must be short: the threads take turns at it, and a GPU takes thousands of jobs a second.
    """
    raw, view = buffer.raw, buffer.view
    if job.size > BUFFER_BYTES:
        # Rare, and seldom worth pinning: tensors that are needed both as they are and transposed.
        raw = torch.empty(job.size, dtype=torch.uint8)
        view = raw.numpy().data
    places, uploads = through_buffer(job)
    ranges = [Range(start, view[place : place + length]) for start, length, place in places]
    num_bytes = read_ranges(source, ranges)
    for start, end, target, offset in uploads:
        memory[target][offset : offset + end - start].copy_(raw[start:end], non_blocking=True)
    if job.copies:
        there = tensor_of(device.alloc(job.buffer_bytes))
        there.copy_(raw[: job.buffer_bytes], non_blocking=True)
        for copy in job.copies:
            apply_copy(copy, there, memory)
    buffer.emptied.record()
    return num_bytes


# --- copies ------------------------------------------------------------------------------------------------------


def apply_copy(copy: Copy, buffer: torch.Tensor, memory: Sequence[torch.Tensor]) -> None:
    """Make one copy from a job's buffer, uint8, to the bytes of its target."""
    stored = buffer.view(torch.float8_e8m0fnu if copy.dtype == "F8_E8M0" else dtypes.BY_NAME[copy.dtype])
    first = copy.offset // stored.element_size()
    source = strided(stored, copy.source._replace(offset=first + copy.source.offset))
    if copy.repack is not None:
        source = repacked(source.clone(memory_format=torch.contiguous_format), copy.repack)
    copy_converted(source, memory[copy.target], copy.destination, copy.casts)


def copy_converted(source: torch.Tensor, raw: torch.Tensor, destination: View, casts: Casts = ()) -> None:
    """Put `source`, converted to each type of `casts` in turn, into a view of the target whose bytes are `raw`.

    Without casts the target's type is the source's.
    """
    for dtype in casts[:-1]:
        source = source.to(dtypes.BY_NAME[dtype])
    target = raw.view(dtypes.BY_NAME[casts[-1]] if casts else source.dtype)
    strided(target, destination).copy_(source)


def strided(flat: torch.Tensor, view: View) -> torch.Tensor:
    """The elements of `flat`, one-dimensional, that `view` describes."""
    return flat.as_strided(view.shape, view.strides, flat.storage_offset() + view.offset)
