"""Opening files that somebody else named: regular ones only."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

# Non-blocking, because opening a pipe would wait for somebody to write to it.
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"
"""What a file begins with that Git LFS has put in another one's place, until it is pulled."""
LFS_FIX = "run `git lfs pull` in the clone of the repository, or download the file"


def open_descriptor(path: str | os.PathLike[str]) -> int:
    """A descriptor of a regular file, to read from. Raises OSError, also for a pipe, socket, device or directory."""
    fd = os.open(path, _FLAGS)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(0, "expected a regular file, found a directory, pipe, socket or device", str(path))


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """A regular file, opened to read from. Raises OSError, as `open_descriptor`."""
    return os.fdopen(open_descriptor(path), "rb")


def read_file(path: Path, limit: int) -> bytes:
    """The content of a regular file, cut after one byte more than `limit`. Raises OSError."""
    with open_file(path) as file:
        # Memory is taken for what is there.
        return file.read(min(limit, os.fstat(file.fileno()).st_size) + 1)
