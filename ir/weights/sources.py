"""Where a checkpoint's bytes come from: a folder of files, each read at any place by any number of threads.

The folder may be a directory here (`LocalFolder`) or on a server (`precast.loader.sources`). What opens a file notes
its stamp, so that a file that changes between its header and its last byte is an error and never wrong weights.

Local files are read through the page cache. Past it (O_DIRECT) a first load is somewhat faster, and every further one
is as slow, where the cache is several times faster (`benchmarks/bench_reads.py` measures both).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol, Self

from precast.ir import files
from precast.ir.errors import WeightsError

MAX_VECTORS = 1024
"""Pieces of memory that one `preadv` fills: IOV_MAX on Linux and macOS."""

Stamp = tuple[int | str | None, ...]
"""What tells one content of a file from another: its size in bytes, and what else the place knows of it."""


class Source(Protocol):
    """An open file. `name` is how messages call it, without credentials; `size` is in bytes.

    All methods raise WeightsError, which says what of the file was read, what was expected and what to do.
    """

    name: str
    size: int
    stamp: Stamp

    def read_into(self, start: int, memory: Sequence[memoryview]) -> int:
        """Fill all of `memory`, one piece after the other, with the bytes from `start` on; how many that are."""
        ...

    def check(self) -> None:
        """Raise WeightsError (`checkpoint-changed`) if the file is no longer what it was when it was opened."""

    def close(self) -> None:
        """Let go of it."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


class Folder(Protocol):
    """Files by their names. `name` is how messages call the folder, without credentials.

    `only`: the one file that was asked for, of a folder that may hold others. `readers`: how many threads read best
    from it at once; None: as many as suit the device.
    """

    name: str
    only: str | None
    readers: int | None

    def has(self, file: str) -> bool:
        """Whether there is a regular file of this name. Raises WeightsError where that can't be found out."""
        ...

    def open(self, file: str, stamp: Stamp | None = None) -> Source:
        """The file. Raises WeightsError, `checkpoint-changed` among others if its stamp is none of `stamp`."""
        ...

    def names(self) -> list[str] | None:
        """What is in it, sorted; None for a place that doesn't list.

        Raises WeightsError (`checkpoint-missing`) where there is no such folder.
        """
        ...

    def stop(self) -> None:
        """End the reads that are under way, with an error, and let none begin: somebody has lost interest."""


def as_folder(checkpoint: str | os.PathLike[str] | Folder) -> Folder:
    """The folder of a checkpoint: a path's, or the folder itself."""
    return LocalFolder(checkpoint) if isinstance(checkpoint, (str, os.PathLike)) else checkpoint


def read_small(source: Source, limit: int) -> bytes:
    """The content of a file, cut after one byte more than `limit`."""
    content = bytearray(min(source.size, limit + 1))
    source.read_into(0, [memoryview(content)])
    return bytes(content)


def changed(name: str, opened: Stamp, found: Stamp | None = None) -> WeightsError:
    """The error for a file whose stamp was `opened`, and is `found` now, if that is known."""
    message = "the file changed while it was read"
    if found is not None and opened[0] != found[0]:
        message += f": it had {opened[0]} bytes, and has {found[0]} now"
    fix = "wait until whoever writes the checkpoint is done, and load again"
    return WeightsError("checkpoint-changed", message, where=name, fix=fix)


class LocalFolder:
    """A directory, or a file and the directory that it is in."""

    readers: int | None = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        root = Path(path)
        try:
            is_file = root.is_file()
        except OSError as error:
            raise _refused(root, error) from None
        self.root = root.parent if is_file else root
        self.only = root.name if is_file else None
        self.name = str(self.root)
        self._stopped = threading.Event()

    def has(self, file: str) -> bool:
        """As the interface says."""
        try:
            return (self.root / file).is_file()
        except OSError as error:  # a directory without permission, above all
            raise _refused(self.root, error) from None

    def open(self, file: str, stamp: Stamp | None = None) -> LocalFile:
        """As the interface says."""
        return LocalFile(self.root / file, stamp, self._stopped)

    def names(self) -> list[str] | None:
        """As the interface says."""
        try:
            if self.root.is_dir():
                return sorted(file.name for file in self.root.iterdir())
        except OSError as error:
            raise _refused(self.root, error) from None
        message = "expected a directory with a checkpoint, found nothing"
        raise WeightsError("checkpoint-missing", message, where=self.name, fix="pass the checkpoint's directory")

    def stop(self) -> None:
        """As the interface says; a read that is under way ends soon by itself."""
        self._stopped.set()


class LocalFile:
    """A regular file. Its stamp is its size, the time of its last change and its inode."""

    def __init__(self, path: Path, stamp: Stamp | None = None, stopped: threading.Event | None = None) -> None:
        """`stopped`: once it is set, no read begins.

        Raises WeightsError (`checkpoint-read`), and `checkpoint-changed` if its stamp is none of `stamp`.
        """
        self.name = str(path)
        self._stopped = stopped
        try:
            self._descriptor = files.open_descriptor(path)
        except OSError as error:
            raise self._unreadable(error) from None
        self.stamp = self._stamp()
        self.size = int(self.stamp[0] or 0)
        if stamp is not None and stamp != self.stamp:
            self.close()
            raise changed(self.name, stamp, self.stamp)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def read_into(self, start: int, memory: Sequence[memoryview]) -> int:
        """As the interface says, by as few system calls as the pieces allow."""
        position = start
        rest = [piece for piece in reversed(memory) if len(piece)]
        while rest:
            if self._stopped is not None and self._stopped.is_set():
                raise WeightsError("checkpoint-read", "the read was stopped", where=self.name)
            batch = rest[: -MAX_VECTORS - 1 : -1]
            try:
                count = os.preadv(self._descriptor, batch, position)
            except OSError as error:
                raise self._unreadable(error) from None
            if count == 0:
                raise self._ended(position)
            position += count
            while rest and count >= len(rest[-1]):
                count -= len(rest.pop())
            if count:
                rest[-1] = rest[-1][count:]
        return position - start

    def check(self) -> None:
        """As the interface says."""
        now = self._stamp()
        if now != self.stamp:
            raise changed(self.name, self.stamp, now)

    def close(self) -> None:
        """As the interface says; closing twice is fine."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):  # of a network's file system, for what was written: nothing was
                os.close(descriptor)

    def _stamp(self) -> Stamp:
        found = os.fstat(self._descriptor)
        return found.st_size, found.st_mtime_ns, found.st_ino

    def _unreadable(self, error: OSError) -> WeightsError:
        return WeightsError("checkpoint-read", f"cannot be read: {error.strerror}", where=self.name)

    def _ended(self, position: int) -> WeightsError:
        self.check()
        message = f"the file ends at byte {position}; its header says that tensors lie beyond"
        fix = "the file is incomplete: download or copy it again"
        return WeightsError("checkpoint-read", message, where=self.name, fix=fix)


def _refused(path: Path, error: OSError) -> WeightsError:
    return WeightsError("checkpoint-read", f"expected a checkpoint: {error.strerror}", where=str(path))
