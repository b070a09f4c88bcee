"""From the pieces of all params to the reads that make them: which bytes of which file go where, in which order.

Bytes that stand in a file as they will stand in memory are read into place. Others (transposed, cast, short rows) are
read into a job's buffer and copied from there by a strided copy, on the target's device. Jobs are of bounded size and
sorted as the files are; bytes that several pieces need are read once, bytes that none needs are left out, but for gaps
too short to be worth a read of their own.

All of it is integers; `precast.loader.weights.stream` executes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from precast.ir.graph.schema import Dtype
from precast.ir.weights.checkpoint import StoredTensor
from precast.loader.weights.chunks import Chunk, chunks_of
from precast.loader.weights.pieces import Casts, Layout, Move, Target
from precast.loader.weights.views import View

ALIGNMENT = 16
"""Where copies begin in a buffer, in bytes: a multiple of every element's size."""


class Granularity(msgspec.Struct, frozen=True):
    """Sizes that the plan keeps to, in bytes.

    `job`: what one job reads at most, and so what a staging buffer must hold. `direct`: rows at least this long are
    read into place one by one; a shorter row costs more as a read of its own than as part of a copy. `gap`: unneeded
    bytes that are read along when they lie between needed ones; skipping them would cost another system call.
    """

    job: int = 8 << 20
    direct: int = 64 << 10
    gap: int = 1 << 10


class Fetch(msgspec.Struct, frozen=True):
    """`length` bytes from `start` of the job's file on, and again at each step of `repeat` (count, distance in bytes;
    outermost first). They go, one run behind the other, to byte `offset` on of a target, or of the job's buffer if
    `target` is None.
    """

    start: int
    length: int
    repeat: tuple[tuple[int, int], ...]
    target: int | None
    offset: int

    @property
    def num_bytes(self) -> int:
        """The bytes of all runs."""
        total = self.length
        for count, _ in self.repeat:
            total *= count
        return total

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(first byte in the file, length, byte in the target or buffer) of each run, in the order of the file."""
        offset = self.offset
        for steps in itertools.product(*(range(0, count * distance, distance) for count, distance in self.repeat)):
            yield self.start + sum(steps), self.length, offset
            offset += self.length


class Copy(msgspec.Struct, frozen=True):
    """Elements of type `dtype` for elements of a target; `source` views the job's buffer from byte `offset` on."""

    dtype: Dtype
    offset: int
    source: View
    target: int
    destination: View
    casts: Casts


class Job(msgspec.Struct, frozen=True):
    """Reads of one file, in its order, and the copies to make once they are done. `buffer_bytes`: what copies need."""

    file: Path
    fetches: tuple[Fetch, ...]
    copies: tuple[Copy, ...]
    buffer_bytes: int

    @property
    def num_bytes(self) -> int:
        """What the job reads."""
        return sum(fetch.num_bytes for fetch in self.fetches)

    @property
    def size(self) -> int:
        """What a buffer must hold that all of the job passes through."""
        return self.buffer_bytes + _direct_bytes(self.fetches)


class Plan(msgspec.Struct, frozen=True):
    """All jobs, by file and place in it; `moves` follow in order once the jobs are done."""

    targets: tuple[Target, ...]
    jobs: tuple[Job, ...]
    moves: tuple[Move, ...]
    ties: dict[str, str]
    bytes_needed: int

    @property
    def bytes_read(self) -> int:
        """What the jobs read: the bytes needed, and the short gaps between them."""
        return sum(job.num_bytes for job in self.jobs)


DEFAULT_SIZES = Granularity()


def plan_reads(layout: Layout, find: Callable[[str], StoredTensor], sizes: Granularity = DEFAULT_SIZES) -> Plan:
    """The reads that fill all targets of `layout`; `find` gives the stored tensor for a name in the recipes."""
    chunks: list[Chunk] = []
    for piece in layout.pieces:
        chunks += chunks_of(piece, find(piece.tensor), sizes.job)
    chunks.sort(key=lambda chunk: (chunk.file, chunk.start, chunk.end))
    units = [_unit(cluster, sizes) for cluster in _clusters(chunks)]
    jobs = tuple(_job(group) for group in _groups(units, sizes.job))
    return Plan(layout.targets, jobs, layout.moves, layout.ties, sum(unit.needed for unit in units))


# --- units: what has to be read together -------------------------------------------------------------------------


class _Unit(NamedTuple):
    """Reads and copies that stand or fall together; offsets in the buffer count from the unit's own first byte."""

    file: Path
    fetches: tuple[Fetch, ...]
    copies: tuple[Copy, ...]
    buffer_bytes: int
    needed: int

    @property
    def size(self) -> int:
        """What a buffer must hold that all of the unit passes through."""
        return self.buffer_bytes + _direct_bytes(self.fetches)


def _clusters(chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    """Chunks whose bytes overlap or interleave in the file, together."""
    cluster: list[Chunk] = []
    end = 0
    for chunk in chunks:
        if cluster and (chunk.file != cluster[0].file or chunk.start >= end):
            yield cluster
            cluster = []
        end = max(end, chunk.end) if cluster else chunk.end
        cluster.append(chunk)
    if cluster:
        yield cluster


def _unit(cluster: list[Chunk], sizes: Granularity) -> _Unit:
    if len(cluster) > 1:
        return _shared_unit(cluster, sizes.gap)
    (chunk,) = cluster
    fetches = _direct_fetches(chunk, sizes.direct)
    if fetches is not None:
        return _Unit(chunk.file, fetches, (), 0, chunk.num_bytes)
    fetch, strides = _dense_fetch(chunk, sizes.gap)
    copy = _copy(chunk, 0, strides)
    return _Unit(chunk.file, (fetch,), (copy,), _aligned(fetch.num_bytes), chunk.num_bytes)


def _direct_fetches(chunk: Chunk, shortest: int) -> tuple[Fetch, ...] | None:
    """Reads straight into the target, one a row; None where rows are too short or elements change their type."""
    rows, length = chunk.dims, 1
    if rows and rows[-1].source == rows[-1].destination == 1:
        rows, length = rows[:-1], rows[-1].size
    if chunk.casts or (rows and length * chunk.itemsize < shortest):
        return None
    fetches = []
    for row in itertools.product(*(range(dim.size) for dim in rows)):
        start = chunk.start + sum(i * dim.source for i, dim in zip(row, rows, strict=True)) * chunk.itemsize
        offset = chunk.destination + sum(i * dim.destination for i, dim in zip(row, rows, strict=True))
        fetches.append(Fetch(start, length * chunk.itemsize, (), chunk.target, offset * chunk.itemsize))
    return tuple(fetches)


def _dense_fetch(chunk: Chunk, gap: int) -> tuple[Fetch, list[int]]:
    """A read of the chunk's runs into a buffer, one behind the other, and the steps of `dims` in there, in elements.

    A run goes on over gaps of at most `gap` bytes.
    """
    length = 1
    strides: list[int] = []
    outer = list(chunk.dims)
    while outer and (outer[-1].source - length) * chunk.itemsize <= gap:
        dim = outer.pop()
        length += (dim.size - 1) * dim.source
        strides.append(dim.source)
    dense = length
    for dim in reversed(outer):
        strides.append(dense)
        dense *= dim.size
    repeat = tuple((dim.size, dim.source * chunk.itemsize) for dim in outer)
    return Fetch(chunk.start, length * chunk.itemsize, repeat, None, 0), strides[::-1]


def _shared_unit(cluster: list[Chunk], gap: int) -> _Unit:
    """All that the chunks need, read once to where it stands in the file, and a copy for each chunk."""
    first = cluster[0]
    runs = sorted(
        (start, start + length) for chunk in cluster for start, length, _ in _dense_fetch(chunk, gap)[0].runs()
    )
    merged: list[list[int]] = []
    for start, end in runs:
        if merged and start - merged[-1][1] <= gap:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    fetches = tuple(Fetch(start, end - start, (), None, start - first.start) for start, end in merged)
    copies = tuple(_copy(chunk, chunk.start - first.start, [dim.source for dim in chunk.dims]) for chunk in cluster)
    read = sum(fetch.num_bytes for fetch in fetches)
    needed = min(read, sum(chunk.num_bytes for chunk in cluster))
    end = max(chunk.end for chunk in cluster)
    return _Unit(first.file, fetches, copies, _aligned(end - first.start), needed)


def _copy(chunk: Chunk, offset: int, strides: list[int]) -> Copy:
    """The chunk's elements, found in the buffer from byte `offset` on in these steps, to their places in the target."""
    shape = tuple(dim.size for dim in chunk.dims)
    destination = View(chunk.destination, shape, tuple(dim.destination for dim in chunk.dims))
    return Copy(chunk.dtype, offset, View(0, shape, tuple(strides)), chunk.target, destination, chunk.casts)


# --- jobs --------------------------------------------------------------------------------------------------------


def _groups(units: Iterable[_Unit], job_bytes: int) -> Iterator[list[_Unit]]:
    """Neighbours of one file, as many as fit a job; a unit that is larger has a job of its own."""
    group: list[_Unit] = []
    size = 0
    for unit in units:
        if group and (unit.file != group[0].file or size + unit.size > job_bytes):
            yield group
            group, size = [], 0
        group.append(unit)
        size += unit.size
    if group:
        yield group


def _job(units: list[_Unit]) -> Job:
    fetches: list[Fetch] = []
    copies: list[Copy] = []
    buffer_bytes = 0
    for unit in units:
        for fetch in unit.fetches:
            shift = buffer_bytes if fetch.target is None else 0
            fetches.append(msgspec.structs.replace(fetch, offset=fetch.offset + shift))
        copies += [msgspec.structs.replace(copy, offset=copy.offset + buffer_bytes) for copy in unit.copies]
        buffer_bytes += unit.buffer_bytes
    return Job(units[0].file, tuple(fetches), tuple(copies), buffer_bytes)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _direct_bytes(fetches: Iterable[Fetch]) -> int:
    return sum(fetch.num_bytes for fetch in fetches if fetch.target is not None)
