"""Reading byte ranges of a file straight into memory, without a copy on the way."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from precast.ir.errors import WeightsError
from precast.ir.files import open_descriptor

MAX_VECTORS = 1024
"""Pieces of memory that one `preadv` fills: IOV_MAX on Linux and macOS."""


class Range(NamedTuple):
    """The bytes of a file from `start` on, as many as `memory` takes."""

    start: int
    memory: memoryview


@contextmanager
def opened(files: Iterable[Path]) -> Iterator[dict[Path, int]]:
    """A descriptor for each file, closed at the end. Raises WeightsError (checkpoint-read)."""
    with ExitStack() as stack:
        descriptors: dict[Path, int] = {}
        for file in files:
            try:
                descriptors[file] = open_descriptor(file)
            except OSError as error:
                raise _unreadable(file, error) from None
            stack.callback(os.close, descriptors[file])
        yield descriptors


def read_ranges(descriptor: int, file: Path, ranges: Iterable[Range]) -> int:
    """Fill the memory of the ranges, in the order of the file; the bytes read. Neighbours are one system call.

    Raises WeightsError (checkpoint-read) where the file ends too early, or the system cannot read it.
    """
    total = 0
    batch: list[memoryview] = []
    begin = end = 0
    for start, memory in ranges:
        if batch and (start != end or len(batch) == MAX_VECTORS):
            total += _fill(descriptor, file, begin, batch)
            batch = []
        if not batch:
            begin = end = start
        batch.append(memory)
        end += len(memory)
    return total + _fill(descriptor, file, begin, batch)


def _fill(descriptor: int, file: Path, start: int, batch: Sequence[memoryview]) -> int:
    rest = [memory for memory in batch if len(memory)]
    position = start
    while rest:
        try:
            count = os.preadv(descriptor, rest, position)
        except OSError as error:
            raise _unreadable(file, error) from None
        if count == 0:
            raise WeightsError(
                "checkpoint-read",
                f"the file ends at byte {position}; its header says that tensors lie beyond",
                where=str(file),
                fix="the file is incomplete, or changed while it was read: download or copy it again",
            )
        position += count
        while rest and count >= len(rest[0]):
            count -= len(rest.pop(0))
        if count:
            rest[0] = rest[0][count:]
    return position - start


def _unreadable(file: Path, error: OSError) -> WeightsError:
    return WeightsError("checkpoint-read", f"cannot be read: {error.strerror}", where=str(file))
