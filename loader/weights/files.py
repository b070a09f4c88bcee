"""Byte ranges of a checkpoint's files, read straight into memory, without a copy on the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from precast.ir.weights.checkpoint import CheckpointFiles
from precast.ir.weights.sources import Source


class Range(NamedTuple):
    """The bytes of a file from `start` on, as many as `memory` takes."""

    start: int
    memory: memoryview


@contextmanager
def opened(checkpoint: CheckpointFiles, names: Iterable[str]) -> Iterator[dict[str, Source]]:
    """Files of a checkpoint by their names, opened, and closed at the end.

    Raises WeightsError (`checkpoint-read`), and `checkpoint-changed` for a file that is another one at the end of the
    body than when its header was read.
    """
    with ExitStack() as stack:
        sources = {name: stack.enter_context(checkpoint.source(name)) for name in names}
        yield sources
        for source in sources.values():
            source.check()


def read_ranges(source: Source, ranges: Iterable[Range]) -> int:
    """Fill the memory of the ranges, in the order of the file; the bytes read. Neighbours are read together.

    Raises WeightsError where the file ends too early or can't be read.
    """
    total = 0
    together: list[memoryview] = []
    begin = end = 0
    for start, memory in ranges:
        if together and start != end:
            total += source.read_into(begin, together)
            together = []
        if not together:
            begin = end = start
        together.append(memory)
        end += len(memory)
    return total + source.read_into(begin, together)
