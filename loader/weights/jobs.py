"""The jobs of a read plan, shared among threads, and how a job's bytes pass through a buffer on their way to a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import NamedTuple

from precast.ir.waits import all_ended
from precast.ir.weights.checkpoint import CheckpointFiles
from precast.ir.weights.sources import Source
from precast.loader.weights.files import opened
from precast.loader.weights.read_plan import Job

Worker = Callable[[Job, Source], int]
"""What one thread does with a job, whose file is this; the bytes read."""


class Upload(NamedTuple):
    """Bytes `start .. end` of a pinned buffer for the bytes from `offset` on of a target."""

    start: int
    end: int
    target: int
    offset: int


def share(
    jobs: Sequence[Job],
    open_worker: Callable[[], AbstractContextManager[Worker]],
    max_threads: int,
    checkpoint: CheckpointFiles,
) -> int:
    """Hand the jobs out, in order, to threads; the bytes read. The first error ends all of them, and is raised."""
    if not jobs:
        return 0
    waiting = deque(jobs)

    def next_job() -> Job | None:
        try:
            return waiting.popleft()
        except IndexError:
            return None

    with opened(checkpoint, sorted({job.file for job in jobs})) as sources:

        def work() -> int:
            try:
                with open_worker() as worker:
                    return sum(worker(job, sources[job.file]) for job in iter(next_job, None))
            finally:
                waiting.clear()  # after an error; else it is empty

        threads = min(max_threads, len(jobs))
        with ThreadPoolExecutor(threads, thread_name_prefix="precast-weights") as pool:
            try:
                return sum(all_ended([pool.submit(work) for _ in range(threads)]))
            except BaseException:  # an interrupt too, which must not wait for a server that says nothing
                waiting.clear()
                checkpoint.folder.stop()
                raise


def through_buffer(job: Job) -> tuple[list[tuple[int, int, int]], list[Upload]]:
    """Where the job's bytes stand in a buffer: first those that copies need, after them those on their way to targets.

    Ranges of the file as (start, length, place in the buffer), and what goes to targets afterwards.
    """
    places: list[tuple[int, int, int]] = []
    uploads: list[Upload] = []
    used = job.buffer_bytes
    for ranges in job.ranges:
        for start, length, offset in ranges.each():
            if ranges.target is None:
                places.append((start, length, offset))
                continue
            places.append((start, length, used))
            last = uploads[-1] if uploads else None
            if last and last.target == ranges.target and last.offset + last.end - last.start == offset:
                uploads[-1] = last._replace(end=used + length)
            else:
                uploads.append(Upload(used, used + length, ranges.target, offset))
            used += length
    return places, uploads
