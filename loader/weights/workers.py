"""The jobs of a read plan, shared among threads: on the host straight into place, to a GPU through pinned buffers."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import torch

from precast.kernels import dtypes
from precast.loader.weights.files import Run, byte_view, opened, read_runs
from precast.loader.weights.pieces import Casts
from precast.loader.weights.read_plan import DEFAULT_SIZES, Copy, Job, Plan
from precast.loader.weights.views import View

MAX_HOST_THREADS = 16
THREADS_A_CORE = 2
"""On a CPU: while one waits for the disk, the other copies."""
DEVICE_THREADS = 8
"""For a GPU: together they read the page cache as fast as the bus takes it."""
BUFFERS_A_THREAD = 2
"""One is read into while the other is on its way to the device."""
BUFFER_BYTES = DEFAULT_SIZES.job
"""128 MiB for all threads: larger ones take longer to pin, smaller ones keep Python busy."""


class Worker(Protocol):
    """What one thread does with its jobs."""

    def run(self, job: Job, descriptor: int) -> int:
        """Do the job, whose file is open; the bytes read."""
        ...

    def finish(self) -> None:
        """Wait until nothing is under way any more, also after an error: the memory may be gone afterwards."""
        ...


def execute(plan: Plan, memory: Sequence[torch.Tensor], buffers: PinnedBuffers | None) -> int:
    """Fill all targets of `plan`; the bytes read. `memory` holds the bytes of each target, uint8.

    `buffers` are those of the GPU that `memory` is on; None: it is on the host. Raises WeightsError (checkpoint-read).
    """
    num_bytes = read_all(plan, memory, buffers)
    move_all(plan, memory)
    return num_bytes


def read_all(plan: Plan, memory: Sequence[torch.Tensor], buffers: PinnedBuffers | None) -> int:
    """Do the jobs of `plan`, as `execute` does, and leave out the moves."""
    if buffers is None:
        threads = min(MAX_HOST_THREADS, THREADS_A_CORE * _num_cores())
        num_bytes = _share(plan.jobs, lambda: HostWorker(plan, memory), threads)
    else:
        # The memory may have been in use before, by work that the current stream has not finished.
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(buffers.device))
        num_bytes = _share(plan.jobs, lambda: DeviceWorker(memory, buffers, ready), DEVICE_THREADS)
        if any(job.copies for job in plan.jobs):
            # torch keeps what a worker's stream allocated for copies for that stream, which is gone.
            torch.cuda.empty_cache()
    return num_bytes


def move_all(plan: Plan, memory: Sequence[torch.Tensor]) -> None:
    """Move what is in temporary targets to where it belongs, in the plan's order."""
    for move in plan.moves:
        source = memory[move.source].view(dtypes.BY_NAME[plan.targets[move.source].dtype])
        copy_converted(strided(source, move.view), memory[move.target], move.destination, move.casts)


def _num_cores() -> int:
    """The cores that this process may use, where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _share(jobs: Sequence[Job], make_worker: Callable[[], Worker], max_threads: int) -> int:
    """Hand the jobs out, in order, to threads; the bytes read. The first error ends all of them, and is raised."""
    if not jobs:
        return 0
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    stop = threading.Event()

    def next_jobs() -> Iterator[Job]:
        while not stop.is_set():
            try:
                yield waiting.get_nowait()
            except queue.Empty:
                return

    def stop_on_error(future: Future[int]) -> None:
        if future.exception() is not None:
            stop.set()

    with opened({job.file for job in jobs}) as descriptors:

        def work() -> int:
            worker = make_worker()
            try:
                return sum(worker.run(job, descriptors[job.file]) for job in next_jobs())
            finally:
                worker.finish()

        threads = min(max_threads, len(jobs))
        with ThreadPoolExecutor(threads, thread_name_prefix="precast-weights") as pool:
            try:
                futures = [pool.submit(work) for _ in range(threads)]
                for future in futures:
                    future.add_done_callback(stop_on_error)
                return sum(future.result() for future in futures)
            finally:
                stop.set()


# --- the host ----------------------------------------------------------------------------------------------------


class HostWorker:
    """Reads into the targets, and into a buffer what has to be copied from there."""

    def __init__(self, plan: Plan, memory: Sequence[torch.Tensor]) -> None:
        self._memory = memory
        self._views = [byte_view(raw) for raw in memory]
        self._buffer = torch.empty(max(job.buffer_bytes for job in plan.jobs), dtype=torch.uint8)
        self._buffer_view = byte_view(self._buffer)

    def run(self, job: Job, descriptor: int) -> int:
        """Read, then copy."""
        num_bytes = read_runs(descriptor, job.file, self._runs(job))
        for copy in job.copies:
            apply_copy(copy, self._buffer, self._memory)
        return num_bytes

    def finish(self) -> None:
        """Nothing is under way when `run` returns."""

    def _runs(self, job: Job) -> Iterator[Run]:
        for fetch in job.fetches:
            view = self._buffer_view if fetch.target is None else self._views[fetch.target]
            for start, length, offset in fetch.runs():
                yield Run(start, view[offset : offset + length])


# --- a GPU -------------------------------------------------------------------------------------------------------


class _Transfer(NamedTuple):
    """Bytes `start .. end` of a pinned buffer for the bytes from `offset` on of a target."""

    start: int
    end: int
    target: int
    offset: int


class _Buffer(NamedTuple):
    """Pinned bytes, the same as a memoryview, and when the device has taken them."""

    raw: torch.Tensor
    view: memoryview
    emptied: torch.cuda.Event


class PinnedBuffers:
    """Buffers for the transfer to a GPU, pinned one after the other by a thread of their own.

    Pinning takes as long as moving 20 times as many bytes to the device, and the driver lets no copy begin meanwhile.
    So it is best begun early: made when the device's context is there, these are ready when the first byte is read.
    """

    def __init__(self, device: torch.device) -> None:
        pool = ThreadPoolExecutor(1, thread_name_prefix="precast-pinning")
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._pinned = deque(pool.submit(self._pin) for _ in range(DEVICE_THREADS * BUFFERS_A_THREAD))
        pool.shutdown(wait=False)

    def take(self) -> _Buffer:
        """The next buffer, once it is pinned."""
        return self._pinned.popleft().result()

    def give_back(self, buffer: _Buffer) -> None:
        """Take a buffer back that nothing is on its way from any more."""
        free: Future[_Buffer] = Future()
        free.set_result(buffer)
        self._pinned.append(free)

    def close(self) -> None:
        """Pin no more of them. Those that nobody took are freed."""
        while self._pinned:
            self._pinned.popleft().cancel()

    def _pin(self) -> _Buffer:
        torch.cuda.set_device(self.device)
        raw = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
        # Waiting for a blocking event leaves the core to those that read.
        return _Buffer(raw, byte_view(raw), torch.cuda.Event(blocking=True))


class DeviceWorker:
    """Reads into pinned buffers in turn, and leaves the rest to the device: copies to it, and copies on it.

    What Python does for a job must be short: the threads take turns at it, and a GPU takes thousands of jobs a second.
    """

    def __init__(self, memory: Sequence[torch.Tensor], buffers: PinnedBuffers, ready: torch.cuda.Event) -> None:
        self._memory = memory
        # The device and the stream of this thread; it runs nothing else.
        torch.cuda.set_device(buffers.device)
        self._stream = torch.cuda.Stream(buffers.device)
        torch.cuda.set_stream(self._stream)
        self._stream.wait_event(ready)
        self._buffers = buffers
        self._taken: deque[_Buffer] = deque()

    def run(self, job: Job, descriptor: int) -> int:
        """Read the job's bytes and queue what the device has to do with them."""
        buffer = self._next_buffer()
        raw, view = buffer.raw, buffer.view
        if job.size > BUFFER_BYTES:
            # Rare, and seldom worth pinning: tensors that are needed both as they are and transposed.
            raw = torch.empty(job.size, dtype=torch.uint8)
            view = byte_view(raw)
        runs, transfers = through_buffer(job)
        num_bytes = read_runs(descriptor, job.file, [Run(start, view[at : at + length]) for start, length, at in runs])
        for start, end, target, offset in transfers:
            self._memory[target][offset : offset + end - start].copy_(raw[start:end], non_blocking=True)
        if job.copies:
            there = torch.empty(job.buffer_bytes, dtype=torch.uint8, device=self._buffers.device)
            there.copy_(raw[: job.buffer_bytes], non_blocking=True)
            for copy in job.copies:
                apply_copy(copy, there, self._memory)
        buffer.emptied.record(self._stream)
        return num_bytes

    def finish(self) -> None:
        """Wait for the stream."""
        self._stream.synchronize()
        while self._taken:
            self._buffers.give_back(self._taken.popleft())

    def _next_buffer(self) -> _Buffer:
        """A buffer that is on its way to nowhere: a new one, or the one that has been on its way for the longest."""
        if len(self._taken) < BUFFERS_A_THREAD:
            self._taken.append(self._buffers.take())
        else:
            self._taken.rotate(-1)
            self._taken[-1].emptied.synchronize()
        return self._taken[-1]


def through_buffer(job: Job) -> tuple[list[tuple[int, int, int]], list[_Transfer]]:
    """Where the job's bytes stand in a buffer: first those that copies need, behind them those on their way to targets.

    Runs of the file as (start, length, place in the buffer), and what is to be transferred to targets afterwards.
    """
    runs: list[tuple[int, int, int]] = []
    transfers: list[_Transfer] = []
    used = job.buffer_bytes
    for fetch in job.fetches:
        for start, length, offset in fetch.runs():
            if fetch.target is None:
                runs.append((start, length, offset))
                continue
            runs.append((start, length, used))
            last = transfers[-1] if transfers else None
            if last and last.target == fetch.target and last.offset + last.end - last.start == offset:
                transfers[-1] = last._replace(end=used + length)
            else:
                transfers.append(_Transfer(used, used + length, fetch.target, offset))
            used += length
    return runs, transfers


# --- copies ------------------------------------------------------------------------------------------------------


def apply_copy(copy: Copy, buffer: torch.Tensor, memory: Sequence[torch.Tensor]) -> None:
    """Make one copy from a job's buffer, uint8, to the bytes of its target."""
    stored = buffer.view(dtypes.BY_NAME[copy.dtype])
    first = copy.offset // stored.element_size()
    source = strided(stored, copy.source._replace(offset=first + copy.source.offset))
    copy_converted(source, memory[copy.target], copy.destination, copy.casts)


def copy_converted(source: torch.Tensor, raw: torch.Tensor, destination: View, casts: Casts) -> None:
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
