"""From the parts of all params to the jobs that read them: which bytes of which file go where, in which order.

Bytes that stand in a file as they will stand in memory are read into place. Others (transposed, cast, repacked, short
rows) are read into a job's buffer and copied from there by a strided copy, on the target's device. Jobs are of bounded
size and sorted as the files are; bytes that several parts need are read once, bytes that none needs are left out, but
for gaps too short to be worth a read of their own.

All of it is integers; `precast.loader.weights.workers` executes it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec

from precast.ir.weights.checkpoint import StoredDtype, StoredTensor
from precast.loader.device import aligned
from precast.loader.weights.cuts import Cut, cuts_of
from precast.loader.weights.parts import Assembly, Casts, Move, Target
from precast.loader.weights.repacked import Words
from precast.loader.weights.views import View

T = TypeVar("T")
ALIGNMENT = 16
"""Where copies begin in a buffer, in bytes: a multiple of every element's size."""


class Granularity(msgspec.Struct, frozen=True):
    """Sizes that the plan keeps to, in bytes.

    `job`: what one job reads at most, and so what a staging buffer must hold. `direct`: rows at least this long are
    read into place one by one; a shorter row costs more as a read of its own than as part of a copy. `gap`: unneeded
    bytes that are read along where they lie between needed ones: with less than a page between them, the system reads
    them anyway, and skipping them would cost another system call.
    """

    job: int = 8 << 20
    direct: int = 64 << 10
    gap: int = 4 << 10


class Ranges(msgspec.Struct, frozen=True):
    """Byte ranges of a job's file: `length` bytes from `start` on, and again at each step of `repeat` (count, distance
    in bytes; outermost first). They go, without gaps, to byte `offset` on of a target, or of the job's buffer if
    `target` is None.
    """

    start: int
    length: int
    repeat: tuple[tuple[int, int], ...]
    target: int | None
    offset: int

    @property
    def num_bytes(self) -> int:
        """The bytes of all of them."""
        return self.length * math.prod(count for count, _ in self.repeat)

    def each(self) -> Iterator[tuple[int, int, int]]:
        """(first byte in the file, length, byte in the target or buffer) of each range, in the order of the file."""
        offset = self.offset
        if len(self.repeat) == 1:  # rows of a matrix, a hundred thousand of them in a model
            ((count, distance),) = self.repeat
            for i in range(count):
                yield self.start + i * distance, self.length, offset + i * self.length
            return
        for steps in itertools.product(*(range(0, count * distance, distance) for count, distance in self.repeat)):
            yield self.start + sum(steps), self.length, offset
            offset += self.length


class Copy(msgspec.Struct, frozen=True):
    """Elements of type `dtype` for elements of a target; `source` views the job's buffer from byte `offset` on.
    `repack`: as of a `Part`; elements are converted afterwards."""

    dtype: StoredDtype
    offset: int
    source: View
    target: int
    destination: View
    casts: Casts
    repack: Words | None = None


class Job(msgspec.Struct, frozen=True):
    """Ranges of one file, in its order, and the copies to make once they are read.

    `buffer_bytes`: what copies need of a buffer. `bytes_needed`: what the parts need of the ranges, without gaps.
    """

    file: str
    ranges: tuple[Ranges, ...]
    copies: tuple[Copy, ...]
    buffer_bytes: int
    bytes_needed: int

    @property
    def size(self) -> int:
        """What a buffer must hold that all of the job passes through."""
        return self.buffer_bytes + sum(each.num_bytes for each in self.ranges if each.target is not None)


class Plan(msgspec.Struct, frozen=True):
    """All jobs, by file and place in it; `moves` follow in order once the jobs are done."""

    targets: tuple[Target, ...]
    jobs: tuple[Job, ...]
    moves: tuple[Move, ...]

    @property
    def bytes_needed(self) -> int:
        """The bytes of the checkpoint that the parts need, each counted once."""
        return sum(job.bytes_needed for job in self.jobs)


DEFAULT_SIZES = Granularity()
REMOTE_SIZES = Granularity(direct=1 << 20, gap=256 << 10)
"""For a server: a request takes as long as the bytes of a gap, where a system call takes next to nothing."""


def plan_reads(assembly: Assembly, find: Callable[[str], StoredTensor], sizes: Granularity = DEFAULT_SIZES) -> Plan:
    """The jobs that fill all targets of `assembly`; `find` gives the stored tensor for a name in the recipes."""
    cuts = [cut for part in assembly.parts for cut in cuts_of(part, find(part.tensor), sizes.job)]
    cuts.sort(key=lambda cut: (cut.file, cut.start, cut.end))
    smallest = (_job_of(cluster, sizes) for cluster in _clusters(cuts))
    of_files = (jobs for _, jobs in itertools.groupby(smallest, lambda job: job.file))
    groups = (group for jobs in of_files for group in grouped(jobs, lambda job: job.size, sizes.job))
    jobs = tuple(map(_joined, groups))
    return Plan(tuple(assembly.targets), jobs, tuple(assembly.moves))


# --- the smallest jobs: what has to be read together -------------------------------------------------------------


def _clusters(cuts: Iterable[Cut]) -> Iterator[list[Cut]]:
    """Cuts whose bytes overlap or interleave in the file, together."""
    cluster: list[Cut] = []
    end = 0
    for cut in cuts:
        if cluster and (cut.file != cluster[0].file or cut.start >= end):
            yield cluster
            cluster = []
        end = max(end, cut.end) if cluster else cut.end
        cluster.append(cut)
    if cluster:
        yield cluster


def _job_of(cluster: list[Cut], sizes: Granularity) -> Job:
    if len(cluster) > 1:
        return _shared(cluster, sizes.gap)
    (cut,) = cluster
    direct = _direct_ranges(cut, sizes.direct)
    if direct is not None:
        return Job(cut.file, direct, (), 0, cut.num_bytes)
    dense, strides = _dense_ranges(cut, sizes.gap)
    return Job(cut.file, (dense,), (_copy(cut, 0, strides),), aligned(dense.num_bytes, ALIGNMENT), cut.num_bytes)


def _direct_ranges(cut: Cut, shortest: int) -> tuple[Ranges, ...] | None:
    """Straight into the target, row by row; None where rows are too short or elements don't stay as they are."""
    rows, length = cut.dims, 1
    if rows and rows[-1].source == rows[-1].destination == 1:
        rows, length = rows[:-1], rows[-1].size
    if cut.casts or cut.repack or (rows and length * cut.itemsize < shortest):
        return None
    if not rows:  # as most are, of tens of thousands
        return (Ranges(cut.start, length * cut.itemsize, (), cut.target, cut.destination * cut.itemsize),)
    ranges = []
    for row in itertools.product(*(range(dim.size) for dim in rows)):
        start = cut.start + sum(i * dim.source for i, dim in zip(row, rows, strict=True)) * cut.itemsize
        offset = cut.destination + sum(i * dim.destination for i, dim in zip(row, rows, strict=True))
        ranges.append(Ranges(start, length * cut.itemsize, (), cut.target, offset * cut.itemsize))
    return tuple(ranges)


def _dense_ranges(cut: Cut, gap: int) -> tuple[Ranges, list[int]]:
    """The cut's rows into a buffer, without gaps of more than `gap` bytes, and the steps of `dims` in there, in
    elements.
    """
    length = 1
    strides: list[int] = []
    outer = list(cut.dims)
    while outer and (outer[-1].source - length) * cut.itemsize <= gap:
        dim = outer.pop()
        length += (dim.size - 1) * dim.source
        strides.append(dim.source)
    dense = length
    for dim in reversed(outer):
        strides.append(dense)
        dense *= dim.size
    repeat = tuple((dim.size, dim.source * cut.itemsize) for dim in outer)
    return Ranges(cut.start, length * cut.itemsize, repeat, None, 0), strides[::-1]


def _shared(cluster: list[Cut], gap: int) -> Job:
    """All that the cuts need, read once to where it stands in the file, and a copy for each cut."""
    first = cluster[0]
    wanted = sorted(
        (start, start + length) for cut in cluster for start, length, _ in _dense_ranges(cut, gap)[0].each()
    )
    merged: list[list[int]] = []
    for start, end in wanted:
        if merged and start - merged[-1][1] <= gap:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    ranges = tuple(Ranges(start, end - start, (), None, start - first.start) for start, end in merged)
    copies = tuple(_copy(cut, cut.start - first.start, [dim.source for dim in cut.dims]) for cut in cluster)
    needed = min(sum(each.num_bytes for each in ranges), sum(cut.num_bytes for cut in cluster))
    end = max(cut.end for cut in cluster)
    return Job(first.file, ranges, copies, aligned(end - first.start, ALIGNMENT), needed)


def _copy(cut: Cut, offset: int, strides: list[int]) -> Copy:
    """The cut's elements, found in the buffer from byte `offset` on in these steps, to their places in the target."""
    shape = tuple(dim.size for dim in cut.dims)
    destination = View(cut.destination, shape, tuple(dim.destination for dim in cut.dims))
    return Copy(cut.dtype, offset, View(0, shape, tuple(strides)), cut.target, destination, cut.casts, cut.repack)


# --- jobs of the allowed size ------------------------------------------------------------------------------------


def grouped(items: Iterable[T], size_of: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Neighbours, as many together as have up to `most` bytes; one that is larger stays alone."""
    group: list[T] = []
    size = 0
    for item in items:
        more = size_of(item)
        if group and size + more > most:
            yield group
            group, size = [], 0
        group.append(item)
        size += more
    if group:
        yield group


def _joined(jobs: list[Job]) -> Job:
    """One job that does what these do; each has its own part of the buffer."""
    ranges: list[Ranges] = []
    copies: list[Copy] = []
    used = 0
    for job in jobs:
        for each in job.ranges:
            shift = used if each.target is None else 0
            ranges.append(msgspec.structs.replace(each, offset=each.offset + shift) if shift else each)
        copies += [msgspec.structs.replace(copy, offset=copy.offset + used) for copy in job.copies]
        used += job.buffer_bytes
    return Job(jobs[0].file, tuple(ranges), tuple(copies), used, sum(job.bytes_needed for job in jobs))
