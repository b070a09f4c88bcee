"""The local store of bundles: blobs by their digests, each once, and for each bundle the list of its manifests.

    blobs/sha256/<hex>      blobs, complete: written elsewhere and renamed
    bundles/<hex>.json      a bundle's `index.json`, by the digest of its image manifest; written after all its blobs
    incoming/<hex>          a blob on its way; what a killed process leaves is gone on from
    lock                    held shared by whoever reads or writes, alone by whoever removes

So a bundle that is listed is whole, whenever a process is killed, and processes share a store without asking. What is
read is held against its digests as in any bundle.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec

from precast.ir import limits
from precast.ir.artifact import Bundle
from precast.ir.bundle import oci
from precast.ir.bundle.attached import Attached
from precast.ir.bundle.codec import decode_foreign_json, encode_json
from precast.ir.bundle.layout import Survey, compose_index, survey_shared
from precast.ir.bundle.oci import Descriptor, Index
from precast.ir.errors import BundleError, PrecastError
from precast.ir.files import open_file, read_file

REFERENCE = "dev.precast.reference"
"""The annotation of a stored list that says under which name the bundle was pulled last."""
_HEX = re.compile(r"[0-9a-f]{64}")
_POLL_SECONDS = 0.02
_READ_BYTES = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Stored(msgspec.Struct, frozen=True):
    """A bundle of the store: its digest, the name it was pulled under, the bytes of its blobs, and when it was used.

    `used` is in seconds since 1970. `own_bytes` counts blobs that no other bundle of the store has.
    """

    digest: str
    reference: str
    bytes: int
    own_bytes: int
    used: float


class Removed(msgspec.Struct, frozen=True):
    """What was removed: bundles by digest, and how many blobs of how many bytes, unfinished ones among them."""

    bundles: tuple[str, ...]
    blobs: int
    bytes: int


class Verified(msgspec.Struct, frozen=True):
    """What was looked at, and what is wrong with it: a message for each bundle or blob."""

    bundles: int
    blobs: int
    bytes: int
    problems: tuple[str, ...]


def default_path(environment: Mapping[str, str] | None = None) -> Path:
    """Where the user's store is: `$PRECAST_STORE`, else `precast/store` in the user's cache directory."""
    environment = os.environ if environment is None else environment
    if path := environment.get("PRECAST_STORE"):
        return Path(path)
    cache = environment.get("XDG_CACHE_HOME", "")
    if os.path.isabs(cache):  # the XDG specification: others are to be ignored
        return Path(cache) / "precast" / "store"
    return Path(environment.get("HOME") or Path.home()) / ".cache" / "precast" / "store"


class Store:
    """The store at a path, which need not exist. Threads and processes may share it."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = default_path() if path is None else Path(path)
        self._blobs = self.path / oci.BLOBS / oci.ALGORITHM
        self._bundles = self.path / "bundles"
        self._incoming = self.path / "incoming"

    # --- reading -------------------------------------------------------------------------------------------------

    def has(self, digest: str, size: int) -> bool:
        """Whether the blob is there, of this size and with the content that its digest says: it is read."""
        try:
            return self.blob(digest).stat().st_size == size and _digest_of(self.blob(digest))[1] == digest
        except OSError:
            return False

    def blob(self, digest: str) -> Path:
        """Where a blob is, or would be."""
        return self.path / oci.blob_path(digest)

    def index(self, digest: str) -> bytes | None:
        """The list of the bundle's manifests, or None where the store doesn't have the bundle.

        Raises BundleError (`bundle-unreadable`): what can't be read is not missing, and must not be removed.
        """
        try:
            return read_file(self._list_file(digest), limits.MAX_INDEX_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._unreadable(error) from None

    def open(self, digest: str) -> Bundle:
        """The bundle of this digest, opened and checked like any other; `path` is the store's.

        Raises BundleError: `bundle-missing` where the store doesn't have it, and those of `Bundle.open`.
        """
        with self.reading():
            index = self.index(digest)
            if index is None:
                fix = "pull it: precast pull HOST/NAME@DIGEST"
                raise BundleError("bundle-missing", f"the store has no {digest}", where=str(self.path), fix=fix)
            found = self._opened(digest, index)
        self.touch(digest)
        return found

    def survey(self, digest: str) -> Survey:
        """The bundle's manifests and what is attached, in little memory. Raises as `open` does."""
        with self.reading():
            found = survey_shared(self.path, self.index(digest) or b"")
        self._check_is(digest, found.descriptor.digest)
        return found

    def touch(self, digest: str) -> None:
        """Note that the bundle was used now, where the store can be written to."""
        with contextlib.suppress(OSError):
            os.utime(self._list_file(digest))

    def listing(self) -> list[Stored]:
        """All bundles, the one that was used last first.

        Raises BundleError (`bundle-unreadable`) for a path that is no directory.
        """
        self._check_place()
        with self.reading():
            lists = {digest: self._list(digest) for digest in self._digests()}
            blobs = {digest: self._named_by(found) for digest, found in lists.items()}
            counts: dict[str, int] = {}
            for named in blobs.values():
                for digest in named:
                    counts[digest] = counts.get(digest, 0) + 1
            found = []
            for digest, index in lists.items():
                sizes = {each: _size(self.blob(each)) for each in blobs[digest]}
                own = sum(size for each, size in sizes.items() if counts[each] == 1)
                reference = index.annotations.get(REFERENCE, "") if index else ""
                used = _modified(self._list_file(digest))
                found.append(Stored(digest, reference, sum(sizes.values()), own, used))
        return sorted(found, key=lambda stored: (-stored.used, stored.digest))

    def verify(self) -> Verified:
        """Read every blob, and open every bundle. Raises BundleError as `listing` does."""
        self._check_place()
        with self.reading():
            files = sorted(self._blobs.iterdir()) if self._blobs.is_dir() else []
            problems, total = [], 0
            for file in files:
                try:
                    size, digest = _digest_of(file)
                except OSError as error:
                    problems.append(f"{file}: can't be read: {error.strerror}")
                    continue
                total += size
                if digest != f"{oci.ALGORITHM}:{file.name}":
                    problems.append(f"{file}: its content is {digest}")
            digests = self._digests()
            for digest in digests:
                try:
                    self._opened(digest, self.index(digest) or b"").check_native()
                except BundleError as error:
                    problems.append(f"{digest}: {error.message} ({error.code})")
        return Verified(len(digests), len(files), total, tuple(problems))

    # --- writing -------------------------------------------------------------------------------------------------

    def receive(
        self,
        digest: str,
        size: int,
        fetch: Callable[[BinaryIO], object],
        stop: threading.Event | None = None,
    ) -> bool:
        """Have `fetch` write the blob, unless it is there; False then. It has checked size and digest when it returns.

        One that is damaged is replaced in one step.
        `fetch` gets a file that may hold the beginning. Where another process or thread is at the same blob, this waits
        for it. Call it under `writing`.

        Raises OSError.
        """
        target, part = self.blob(digest), self._incoming / digest.removeprefix(f"{oci.ALGORITHM}:")
        while not self.has(digest, size):
            fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            with open(fd, "r+b", buffering=0) as file:
                if not _lock(fd, fcntl.LOCK_EX, stop):
                    return False
                if not _is_at(fd, part):
                    continue  # it was finished, or removed, between our two steps
                if self.has(digest, size):  # it was finished before we made a file for it
                    os.unlink(part)
                    return False
                fetch(file)
                os.replace(part, target)
                return True
        return False

    def put(self, data: bytes) -> str:
        """Keep a blob that is at hand; its digest. Call it under `writing`."""
        digest = oci.digest_of(data)

        def write(file: BinaryIO) -> None:
            file.truncate(0)
            file.write(data)

        self.receive(digest, len(data), write)
        return digest

    def record(self, image: Descriptor, attached: tuple[Attached, ...], reference: str) -> None:
        """List a bundle, whose blobs are all there. Call it under `writing`."""
        index = msgspec.json.decode(compose_index(image, attached), type=Index)
        named = msgspec.structs.replace(index, annotations={REFERENCE: reference})
        target = self._list_file(image.digest)
        beside = self._incoming / f"{target.name}.{os.getpid()}.{threading.get_ident()}"
        beside.write_bytes(encode_json(named))
        os.replace(beside, target)

    def collect(self, unused_days: float | None = None) -> Removed:
        """Remove blobs that no bundle has, and unfinished ones; before that, bundles that were not used for so long.

        Waits until nobody reads or writes, and makes nothing where no store is. Raises PrecastError (`write-failed`),
        and BundleError as `listing` does.
        """
        self._check_place()
        if not (self._blobs.is_dir() and self._bundles.is_dir()):
            return Removed((), 0, 0)
        with self._held(fcntl.LOCK_EX):
            dropped = []
            for digest in self._digests():
                days = (time.time() - _modified(self._list_file(digest))) / 86400
                if (unused_days is not None and days >= unused_days) or self._list(digest) is None:
                    self._list_file(digest).unlink()
                    dropped.append(digest)
            kept = {each for digest in self._digests() for each in self._named_by(self._list(digest))}
            unwanted = [
                *(file for file in self._blobs.iterdir() if f"{oci.ALGORITHM}:{file.name}" not in kept),
                *self._incoming.iterdir(),
            ]
            size = sum(map(_size, unwanted))
            for file in unwanted:
                file.unlink()
        return Removed(tuple(dropped), len(unwanted), size)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """While something is written. Raises PrecastError: `disk-full` or `write-failed`."""
        with self._held(fcntl.LOCK_SH):
            yield

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """While something is read; also of a store that can't be written to."""
        try:
            fd = os.open(self.path / "lock", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # nobody removes anything from a store without a lock
            yield
            return
        try:
            _lock(fd, fcntl.LOCK_SH)
            yield
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """While a bundle is fetched, if need be, and read: nobody removes it between. Also of a read-only store."""
        with contextlib.suppress(OSError):
            os.close(self._prepared())
        with self.reading():
            yield

    def _prepared(self) -> int:
        """The lock, opened, of a store that is made if it isn't there."""
        for directory in (self._blobs, self._bundles, self._incoming):
            directory.mkdir(parents=True, exist_ok=True)
        return os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    @contextlib.contextmanager
    def _held(self, kind: int) -> Iterator[None]:
        try:
            fd = self._prepared()
            try:
                _lock(fd, kind)
                yield
            finally:
                os.close(fd)
        except OSError as error:
            is_full = error.errno in _FULL
            fix = "name another place in PRECAST_STORE" + (", or free some: precast store gc" if is_full else "")
            code = "disk-full" if is_full else "write-failed"
            message = f"the store can't be written to: {error.strerror or error}"
            raise PrecastError(code, message, where=str(error.filename or self.path), fix=fix) from error

    # --- lists ---------------------------------------------------------------------------------------------------

    def _opened(self, digest: str, index: bytes) -> Bundle:
        found = Bundle.open_shared(self.path, index)
        self._check_is(digest, found.digest)
        return found

    def _check_is(self, digest: str, found: str) -> None:
        """Raise BundleError where a list leads to another bundle: whoever may write to the store can write it."""
        if found != digest:
            message, fix = f"expected {digest}, found {found}", "pull the bundle again: precast pull HOST/NAME@DIGEST"
            raise BundleError("index-invalid", message, where=str(self._list_file(digest)), fix=fix)

    def _list_file(self, digest: str) -> Path:
        return self._bundles / f"{digest.removeprefix(f'{oci.ALGORITHM}:')}.json"

    def _digests(self) -> list[str]:
        try:
            names = [file.stem for file in self._bundles.iterdir() if file.suffix == ".json"]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise self._unreadable(error) from None
        return [f"{oci.ALGORITHM}:{name}" for name in sorted(names) if _HEX.fullmatch(name)]

    def _check_place(self) -> None:
        """Raise BundleError (`bundle-unreadable`) where the store's path is something else than a directory."""
        if os.path.lexists(self.path) and not self.path.is_dir():
            message, fix = "expected the store's directory, found something else", "name another place in PRECAST_STORE"
            raise BundleError("bundle-unreadable", message, where=str(self.path), fix=fix)

    def _unreadable(self, error: OSError) -> BundleError:
        message, where = f"the store can't be read: {error.strerror or error}", str(error.filename or self.path)
        return BundleError("bundle-unreadable", message, where=where, fix="name another place in PRECAST_STORE")

    def _list(self, digest: str) -> Index | None:
        data = self.index(digest) or b""
        try:
            return decode_foreign_json(data, Index, oci.INDEX_FILE, limits.MAX_INDEX_BYTES)
        except BundleError:
            return None

    def _named_by(self, index: Index | None) -> set[str]:
        """All blobs of a bundle: its manifests, and what they name; of a damaged one those that can be told."""
        named: set[str] = set()
        for entry in index.manifests if index else ():
            named.add(entry.digest)
            with contextlib.suppress(OSError, msgspec.DecodeError, ValueError, RecursionError):
                data = read_file(self.blob(entry.digest), limits.MAX_JSON_BYTES)
                named.update(part.digest for part in msgspec.json.decode(data, type=_Parts).all())
        return {digest for digest in named if _HEX.fullmatch(digest.removeprefix(f"{oci.ALGORITHM}:"))}


class _Part(msgspec.Struct):
    digest: str


class _Parts(msgspec.Struct):
    config: _Part
    layers: tuple[_Part, ...] = ()

    def all(self) -> tuple[_Part, ...]:
        """Whatever a manifest names."""
        return (self.config, *self.layers)


def _lock(fd: int, kind: int, stop: threading.Event | None = None) -> bool:
    """Wait for the lock; False if `stop` ended the waiting."""
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if stop is None:
                time.sleep(_POLL_SECONDS)
            elif stop.wait(_POLL_SECONDS):
                return False


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _digest_of(file: Path) -> tuple[int, str]:
    """Size and digest of a file's content."""
    found, size = hashlib.sha256(), 0
    with open_file(file) as stream:
        while data := stream.read(_READ_BYTES):
            found.update(data)
            size += len(data)
    return size, f"{oci.ALGORITHM}:{found.hexdigest()}"


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
