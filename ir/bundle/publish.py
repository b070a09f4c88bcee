"""Writing a directory so that its path never leads to half of it, whenever the writer is stopped.

The directory is written beside its place under a name of its own, flushed to the disk, and put in place by one
rename; what was there before is exchanged in the same step and removed afterwards. A lock file beside it keeps
writers apart. What a killed writer leaves (the lock file, the unfinished directory) disturbs nobody and is cleaned up
by the next one. This module needs a POSIX system; reading a bundle does not need this module.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from precast.ir.errors import BuildError

Checked = TypeVar("Checked")

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SOURCE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_COPIED_BYTES = 1 << 20  # at a time, so that a file of any size takes as much memory
_AT_FDCWD = -100  # Linux; renameat2 is Linux's own
_RENAME_EXCHANGE = 2
# Kernels and file systems without the exchange say one of these.
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)


def publish(
    path: Path,
    files: Mapping[str, bytes | Path],
    *,
    may_replace: Callable[[Path], bool],
    check: Callable[[Path], Checked],
) -> Checked:
    """Write `files` (relative path -> content, or a file that has it) as the directory `path`, all or nothing.

    `check` is called with the finished directory before it is put in place; it refuses it by raising, and what it
    returns is returned. What is at `path` is replaced if it is an empty directory or `may_replace` says so.

    Raises BuildError: `build-in-progress`, `output-not-a-bundle`, `disk-full` or `write-failed`.
    """
    path = Path(os.path.abspath(path))
    check_place(path, may_replace)
    building, replaced = (path.with_name(f".{path.name}.{state}") for state in ("building", "replaced"))
    with _errors_of_the_system(path, files), _locked(path):
        _tidy(path, building, replaced)
        check_place(path, may_replace)
        try:
            _write(building, files)
            checked = check(building)
            _put_in_place(building, path, replaced)
        finally:
            _remove(building)
        return checked


def check_place(path: Path, may_replace: Callable[[Path], bool]) -> None:
    """Raise BuildError `write-failed` or `output-not-a-bundle` for a path that `publish` would not write to."""
    path = Path(os.path.abspath(path))
    if not path.parent.is_dir() or not path.name:
        message = "expected a path in a directory that exists"
        raise BuildError("write-failed", message, where=str(path), fix=f"make the directory {path.parent} first")
    with _errors_of_the_system(path, {}):
        may_write = _may_write(path, may_replace)
    if not may_write:
        message = "expected nothing, an empty directory or a bundle, found something else; it is never overwritten"
        fix = "choose another path, or remove what is there"
        raise BuildError("output-not-a-bundle", message, where=str(path), fix=fix)


@contextmanager
def _errors_of_the_system(path: Path, files: Mapping[str, bytes | Path]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            size = sum(map(_size_of, files.values()))
            message = f"the bundle takes {size} bytes, and there is no room for them: {error.strerror}"
            fix = "free some space, or choose another path; nothing was left behind"
            raise BuildError("disk-full", message, where=str(path), fix=fix) from error
        message = f"the bundle could not be written: {error.strerror or error}"
        raise BuildError("write-failed", message, where=str(error.filename or path)) from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of `path`, a file beside it that exists while somebody holds it or was killed doing so."""
    lock = path.with_name(path.name + ".lock")
    while True:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                message = "another build is writing to this path"
                fix = "wait for it, or choose another path"
                raise BuildError("build-in-progress", message, where=str(path), fix=fix) from None
            if not _is_at(fd, lock):
                continue  # The holder before us removed the file between our two steps: it locks nobody out.
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
            return
        finally:
            os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _tidy(path: Path, building: Path, replaced: Path) -> None:
    """Undo what a killed writer left: its unfinished directory, and an exchange that stopped half-way."""
    if os.path.lexists(replaced):
        if os.path.lexists(path):
            _remove(replaced)
        else:
            replaced.rename(path)
    _remove(building)


def _may_write(path: Path, may_replace: Callable[[Path], bool]) -> bool:
    """Whether `path` may be written to; looked at again where another writer replaces it meanwhile."""
    while True:
        seen = _stamp(path)
        found = seen is None or _is_ours(path, may_replace)
        if found or _stamp(path) == seen:
            return found


def _is_ours(path: Path, may_replace: Callable[[Path], bool]) -> bool:
    try:
        return not path.is_symlink() and path.is_dir() and (not any(path.iterdir()) or may_replace(path))
    except FileNotFoundError:  # it was removed since
        return False


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """What is at `path`, in numbers that change when something else takes its place; None for nothing."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns


def _write(root: Path, files: Mapping[str, bytes | Path]) -> None:
    """Write and flush all files, then the directories that hold them, deepest first."""
    root.mkdir()
    directories = {root}
    for name, content in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        directories.update(parent for parent in file.parents if parent.is_relative_to(root))
        with file.open("xb") as stream:
            if isinstance(content, bytes):
                stream.write(content)
            else:
                with open(os.open(content, _SOURCE_FLAGS), "rb") as source:
                    shutil.copyfileobj(source, stream, _COPIED_BYTES)
            stream.flush()
            os.fsync(stream.fileno())
    for directory in sorted(directories, key=lambda directory: -len(directory.parts)):
        _flush(directory)


def _size_of(content: bytes | Path) -> int:
    if isinstance(content, bytes):
        return len(content)
    return content.stat().st_size if content.exists() else 0


def _put_in_place(building: Path, path: Path, replaced: Path) -> None:
    """Make `path` lead to the new directory; what was there is at `building` afterwards, or gone."""
    if not os.path.lexists(path):
        building.rename(path)
    elif not _exchange(building, path):
        # Between these two renames nothing is at `path`; a writer that finds it so puts the old bundle back.
        path.rename(replaced)
        building.rename(path)
        _remove(replaced)
    _flush(path.parent)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two directories in one step; False where the system can't."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(b))


def _flush(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove(path: Path) -> None:
    """Remove the directory, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
