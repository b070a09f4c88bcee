"""Parts cut to the size of a job, as nested rows of elements.

A cut says the same as a part, in the terms of the file: where its elements lie, and in which steps they are taken.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

import msgspec

from precast.ir.weights.checkpoint import StoredDtype, StoredTensor
from precast.loader.weights import views
from precast.loader.weights.parts import Casts, Part
from precast.loader.weights.repacked import EXCHANGED, Words
from precast.loader.weights.views import View


class Dim(NamedTuple):
    """`size` elements, `source` elements apart in the file and `destination` elements apart in the target."""

    size: int
    source: int
    destination: int


class Cut(NamedTuple):
    """As much of a part as a job reads: elements in `start .. end` of the file; `dims` by falling source steps, where
    words are exchanged those of the part."""

    file: str
    start: int
    end: int
    dtype: StoredDtype
    itemsize: int
    dims: tuple[Dim, ...]
    target: int
    destination: int
    casts: Casts
    repack: Words | None = None

    @property
    def num_bytes(self) -> int:
        """The bytes of its elements."""
        return math.prod(dim.size for dim in self.dims) * self.itemsize


def cuts_of(part: Part, stored: StoredTensor, job_bytes: int) -> Iterator[Cut]:
    """The part as cuts whose elements lie within `job_bytes` bytes of the file; its tensor is not empty."""
    itemsize = stored.nbytes // math.prod(stored.shape)
    dtype = _known(stored.dtype)
    are_apart = part.repack in EXCHANGED
    dims = _dims(part.source, part.destination) if are_apart else _merged(part.source, part.destination)
    offsets = part.source.offset, part.destination.offset
    for inner, source, destination in _split(dims, *offsets, job_bytes // itemsize, only_first=are_apart):
        start = stored.offset + source * itemsize
        end = start + _span(inner) * itemsize
        yield Cut(stored.file, start, end, dtype, itemsize, inner, part.target, destination, part.casts, part.repack)


@cache  # there are tens of thousands of tensors, of a few types
def _known(dtype: str) -> StoredDtype:
    return msgspec.convert(dtype, StoredDtype)


def _merged(source: View, destination: View) -> tuple[Dim, ...]:
    """The common dimensions of both views, by source step; those that lie one inside the other in both are one."""
    if source.strides == destination.strides and source.strides == views.contiguous(source.shape).strides:
        size = math.prod(source.shape)  # as of most tensors
        return (Dim(size, 1, 1),) if size > 1 else ()
    dims = [dim for dim in _dims(source, destination) if dim.size > 1]
    merged: list[Dim] = []
    for dim in sorted(dims, key=lambda dim: -dim.source):
        last = merged[-1] if merged else None
        if last and last.source == dim.source * dim.size and last.destination == dim.destination * dim.size:
            merged[-1] = Dim(last.size * dim.size, dim.source, dim.destination)
        else:
            merged.append(dim)
    return tuple(merged)


def _dims(source: View, destination: View) -> tuple[Dim, ...]:
    return tuple(itertools.starmap(Dim, zip(source.shape, source.strides, destination.strides, strict=True)))


def _span(dims: Iterable[Dim]) -> int:
    """The elements from the first to the last in the source."""
    return 1 + sum((dim.size - 1) * dim.source for dim in dims)


def _split(
    dims: tuple[Dim, ...], source: int, destination: int, limit: int, *, only_first: bool
) -> Iterator[tuple[tuple[Dim, ...], int, int]]:
    """What lies within `limit` elements of the source each: (dims, source offset, destination offset).

    The rows of each are a multiple of one number, counted from the start of the stored tensor, so that several parts
    of one tensor are cut alike and can share their reads. With `only_first` what is in one row stays together, however
    large it is.
    """
    if _span(dims) <= limit:
        yield dims, source, destination
        return
    (count, step, destination_step), inner = dims[0], dims[1:]
    rows = max(1, limit // step)
    first = source // step
    done = 0
    while done < count:
        taken = min(count - done, rows - (first + done) % rows)
        at = source + done * step, destination + done * destination_step
        if taken == 1 and not only_first:
            yield from _split(inner, *at, limit, only_first=False)
        else:
            yield (Dim(taken, step, destination_step), *inner), *at
        done += taken
