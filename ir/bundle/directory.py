"""An open directory and the regular files below it, read without following any link.

Names are looked up in the directory that was opened, wherever it moves meanwhile: a bundle that is replaced while
it is read is never mixed with the one that takes its place.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from precast.ir.errors import BundleError

_BLOCK_BYTES = 1 << 20
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Non-blocking, because opening a pipe would wait for somebody to write to it.
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# What opening a symbolic link, a file as a directory, or a socket gives.
_WRONG_KIND = (errno.ELOOP, errno.EMLINK, errno.ENOTDIR, errno.ENXIO)


@contextmanager
def opened(path: Path) -> Iterator[Directory]:
    """The directory at `path`, which may itself be a link to one.

    Raises BundleError: `bundle-missing`, `bundle-not-a-directory` or `bundle-unreadable`.
    """
    where = str(path)
    try:
        fd = os.open(path, _DIRECTORY_FLAGS)
    except (FileNotFoundError, ValueError):  # ValueError: a null byte in the path
        fix = "check the path, or build the bundle"
        raise BundleError("bundle-missing", "expected a bundle, found nothing", where=where, fix=fix) from None
    except NotADirectoryError:
        message = "expected a bundle, which is a directory, found a file"
        raise BundleError("bundle-not-a-directory", message, where=where) from None
    except OSError as error:
        raise BundleError("bundle-unreadable", f"expected a bundle: {error.strerror}", where=where) from None
    try:
        yield Directory(fd)
    finally:
        os.close(fd)


class Directory:
    """An open directory. All names are single components."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @contextmanager
    def entered(self, name: str) -> Iterator[Directory]:
        """The directory `name` in this one.

        Raises BundleError: `layout-missing`, `layout-kind` or `bundle-unreadable`.
        """
        fd = self._open(name, _DIRECTORY_FLAGS | os.O_NOFOLLOW, "a directory", "layout-missing")
        try:
            yield Directory(fd)
        finally:
            os.close(fd)

    def holds(self, name: str) -> bool:
        """Whether there is anything of this name in the directory, be it a link that leads nowhere."""
        try:
            os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise BundleError("bundle-unreadable", f"expected a bundle: {error.strerror}", where=name) from None
        return True

    def refuse_extra(self, names: Set[str]) -> None:
        """Raise BundleError (`layout-extra`) where the directory holds anything but `names`."""
        with os.scandir(self._fd) as entries:
            for entry in entries:
                if entry.name not in names:
                    message = f"{entry.name[:200]!r} is no part of the bundle"
                    raise BundleError("layout-extra", message, fix="move it elsewhere, or copy the bundle again")

    def read(self, name: str, limit: int) -> bytes:
        """The content of the file `name`, of at most `limit` bytes.

        Raises BundleError: `layout-missing`, `layout-kind`, `limit-exceeded` or `bundle-unreadable`.
        """
        data = self._read(name, limit, "layout-missing")
        if len(data) > limit:
            raise BundleError("limit-exceeded", f"more than {limit} bytes", where=name)
        return data

    def read_exactly(self, name: str, size: int) -> bytes:
        """The content of the file `name`, of exactly `size` bytes.

        Raises BundleError: `blob-missing`, `blob-size`, `layout-kind` or `bundle-unreadable`.
        """
        data = self._read(name, size, "blob-missing")
        if len(data) != size:
            raise _wrong_size(name, size, len(data))
        return data

    def hash_exactly(self, name: str, size: int) -> str:
        """The SHA-256 of the file `name`, of exactly `size` bytes, in hex; read block by block.

        Raises what `read_exactly` does.
        """
        found, length = hashlib.sha256(), 0
        with self._file(name, "blob-missing") as file:
            while length <= size and (data := file.read(_BLOCK_BYTES)):
                found.update(data)
                length += len(data)
        if length != size:
            raise _wrong_size(name, size, length)
        return found.hexdigest()

    def was_replaced(self, path: Path) -> bool:
        """Whether `path` leads to another directory by now, or to none."""
        try:
            return not os.path.samestat(os.stat(path), os.fstat(self._fd))
        except OSError:
            return True

    def _read(self, name: str, size: int, missing: str) -> bytes:
        """The content of the file, cut after one byte more than `size`."""
        with self._file(name, missing) as file:
            # The size comes from the bundle; memory is taken for what is there.
            return file.read(min(size, os.fstat(file.fileno()).st_size) + 1)

    @contextmanager
    def _file(self, name: str, missing: str) -> Iterator[BinaryIO]:
        """The file `name`, opened to be read."""
        fd = self._open(name, _FILE_FLAGS, "a file", missing)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise BundleError("layout-kind", "expected a file, found something else", where=name)
            with open(fd, "rb", closefd=False) as file:
                yield file
        except OSError as error:
            raise BundleError("bundle-unreadable", f"{error.strerror}", where=name) from None
        finally:
            os.close(fd)

    def _open(self, name: str, flags: int, expected: str, missing: str) -> int:
        try:
            return os.open(name, flags, dir_fd=self._fd)
        except FileNotFoundError:
            raise BundleError(missing, f"expected {expected}, found nothing", where=name) from None
        except OSError as error:
            code = "layout-kind" if error.errno in _WRONG_KIND else "bundle-unreadable"
            raise BundleError(code, f"expected {expected}: {error.strerror}", where=name) from None


def _wrong_size(name: str, size: int, length: int) -> BundleError:
    found = f"{length}" if length < size else "more"
    fix = "the file was truncated or changed: copy or build the bundle again"
    return BundleError("blob-size", f"expected {size} bytes, found {found}", where=name, fix=fix)
