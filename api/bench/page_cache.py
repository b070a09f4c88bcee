"""The page cache: files that are in it, and files that are not, on purpose."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

SAMPLES = 64
"""Places of a file at which is looked whether it is cached."""


def warm(files: Iterable[Path]) -> None:
    """Read the files once."""
    buffer = bytearray(8 << 20)
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def drop(files: Iterable[Path]) -> None:
    """Ask the kernel to forget the files' pages. It keeps those that a process has mapped, and those of some disks."""
    for file in files:
        with suppress(OSError), file.open("rb", buffering=0) as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(files: Iterable[Path]) -> float | None:
    """The share of a sample of the files' pages that a read gets without a disk; None where the system doesn't tell."""
    found = looked = 0
    for file in files:
        with file.open("rb", buffering=0) as opened:
            size = os.fstat(opened.fileno()).st_size
            for index in range(SAMPLES if size else 0):
                try:
                    place = size * index // SAMPLES
                    found += os.preadv(opened.fileno(), [bytearray(1)], place, os.RWF_NOWAIT)
                except BlockingIOError:
                    pass
                except (OSError, AttributeError):  # a file system, or a system, that can't say
                    return None
                looked += 1
    return found / looked if looked else None


def packages(folder: Path) -> list[Path]:
    """The files of installed packages that are worth dropping: of 64 KiB and more."""
    found = []
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                if os.stat(os.path.join(root, name)).st_size >= 64 << 10:
                    found.append(Path(root, name))
    return found
