"""A bundle from a registry into the store, and from there to wherever it is wanted."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from precast.ir import limits
from precast.ir.artifact import Bundle
from precast.ir.bundle import attached as attachments
from precast.ir.bundle import oci
from precast.ir.bundle.attached import Attached, Part
from precast.ir.bundle.codec import decode_json
from precast.ir.bundle.layout import compose_index, decode_image, is_bundle
from precast.ir.bundle.oci import Descriptor
from precast.ir.errors import BundleError, PrecastError, RegistryError, shown
from precast.registry import referrers
from precast.registry.client import Count, Found, Repository
from precast.registry.push import WORKERS, Progress
from precast.registry.reference import Reference
from precast.registry.referrers import Listed
from precast.registry.store import Store
from precast.registry.workers import each


class Pulled(msgspec.Struct, frozen=True):
    """What a pull did. `reference` names the bundle by digest; `path` is where it was written to, or None.

    `fetched_bytes` came over the network, `shared_bytes` were in the store. `attached` are the artifact types of the
    attached manifests by their digests; `notes` say which were passed over.
    """

    reference: str
    digest: str
    path: str | None
    fetched_bytes: int
    shared_bytes: int
    attached: dict[str, str]
    notes: tuple[str, ...] = ()


def pull(
    reference: str | Reference,
    out: str | os.PathLike[str] | None = None,
    *,
    store: Store | None = None,
    refresh: bool = False,
    plain_http: bool = False,
    progress: Progress | None = None,
    repository: Repository | None = None,
) -> Pulled:
    """Pull a bundle and what is attached to it into the store, and with `out` write it there as a directory.

    What the store has is not fetched again, but what of it is damaged: all of a bundle's blobs are read. Of one that
    the store has whole, a tag is asked for once and a digest not at all. `refresh` asks what is attached by now all the
    same. `repository` takes the place of connections made here.

    Raises RegistryError, BundleError for what is no bundle or is damaged, and PrecastError and BuildError where the
    store or `out` can't be written.
    """
    wanted = Reference.parse(reference) if isinstance(reference, str) else reference
    store = store or Store()
    if out is not None:
        from precast.ir.bundle.publish import check_place

        check_place(Path(out), is_bundle)
    source = repository or Repository(wanted, plain_http=plain_http)
    with store.using():
        try:
            pulled = _into_store(source, wanted, store, refresh, progress)
        finally:
            if repository is None:
                source.transport.close()
        if out is None:
            return pulled
        write_out(store, pulled.digest, Path(out))
    return msgspec.structs.replace(pulled, path=str(out))


def write_out(store: Store, digest: str, out: Path) -> Bundle:
    """Write a bundle of the store to the directory `out`, all or nothing. Raises as `write_bundle` does."""
    from precast.ir.bundle.publish import publish

    found = store.survey(digest)
    digests = {found.descriptor.digest, *(part.digest for part in found.parts)}
    for extra in found.attached:
        digests |= set(extra.blobs())
    content: dict[str, bytes | Path] = {oci.blob_path(each): store.blob(each) for each in sorted(digests)}
    content[oci.INDEX_FILE] = compose_index(found.descriptor, found.attached)
    content[oci.LAYOUT_FILE] = oci.MARKER
    with store.reading():
        return publish(out, content, may_replace=is_bundle, check=Bundle.open_whole)


def _into_store(
    source: Repository, wanted: Reference, store: Store, refresh: bool, progress: Progress | None
) -> Pulled:
    digest = wanted.digest or source.resolve(wanted.tag or "latest")
    named = wanted.at(digest)
    if not refresh and store.index(digest) is not None:
        with contextlib.suppress(BundleError):  # what is damaged is fetched below
            found = store.survey(digest)
            if all(store.has(part.digest, part.size) for part in found.parts):
                store.touch(digest)
                return _pulled(named, 0, sum(part.size for part in found.parts), found.attached)
    with store.writing():
        return _fetch(source, named, digest, store, progress)


def _fetch(source: Repository, named: Reference, digest: str, store: Store, progress: Progress | None) -> Pulled:
    manifest = _image_manifest(source, digest)
    image = decode_image(manifest)
    descriptor = oci.describe(manifest, oci.IMAGE_TYPE)
    found: list[tuple[list[Listed], list[str]]] = []
    fetching = _Fetching(source, store, progress)
    # What is attached is looked for while the bundle's own blobs come.
    fetching.fetch((image.config, *image.layers), beside=lambda: found.append(referrers.find(source, descriptor)))
    ((listed, notes),) = found
    fetching.fetch([part for extra in listed for part in extra.document.parts])
    store.put(manifest)
    attached = tuple(_keep(store, extra) for extra in listed)
    for extra in attached:
        if extra.artifact_type == oci.PROVENANCE and not _is_record(extra):
            notes.append(f"passed over {extra.digest}: its provenance record is no object of canonical JSON")
            attached = tuple(other for other in attached if other is not extra)
    store.record(descriptor, attached, str(Reference(named.host, named.name, named.tag)))
    return _pulled(named, fetching.fetched, fetching.shared, attached, notes)


def _pulled(
    named: Reference, fetched: int, shared: int, attached: tuple[Attached, ...], notes: Sequence[str] = ()
) -> Pulled:
    assert named.digest is not None
    reference = str(Reference(named.host, named.name, digest=named.digest))
    types = {extra.digest: extra.artifact_type for extra in attached}
    return Pulled(reference, named.digest, None, fetched, shared, types, tuple(notes))


def _image_manifest(source: Repository, digest: str) -> bytes:
    """The bytes of the bundle's image manifest. Raises BundleError (`artifact-type`) for an index of images."""
    found: Found = source.manifest(digest, limits.MAX_JSON_BYTES)
    if found.media_type == oci.IMAGE_TYPE:
        return found.data
    message = f"expected a bundle, found an index of images ({shown(found.media_type)})"
    fix = "a bundle that was pushed with --image is mounted by a runtime; pull the one that was pushed without"
    raise BundleError("artifact-type", message, where=str(source.reference), fix=fix)


class _Fetching:
    """Blobs on their way into a store, each once; and how many bytes of them came, or were there."""

    def __init__(self, source: Repository, store: Store, progress: Progress | None) -> None:
        self._source = source
        self._store = store
        self._progress = progress
        self._seen: set[str] = set()
        self._done = 0
        self.fetched = 0
        self.shared = 0

    def fetch(self, parts: Iterable[Descriptor | Part], beside: Callable[[], object] = lambda: None) -> None:
        """Have all blobs in the store, the largest first, and do `beside` meanwhile."""
        wanted = {part.digest: Descriptor(part.media_type, part.digest, part.size) for part in parts}
        new = [part for digest, part in wanted.items() if digest not in self._seen]
        missing = [part for part in new if not self._store.has(part.digest, part.size)]
        self._seen.update(wanted)
        size = sum(part.size for part in missing)
        _check_room(self._store, size)
        self.fetched += size
        self.shared += sum(part.size for part in new) - size
        steps: list[Callable[[], object]] = [beside]
        steps += [partial(self._fetch, part) for part in sorted(missing, key=lambda part: -part.size)]
        each(steps, lambda step: step(), self._source.transport, WORKERS)

    def _fetch(self, part: Descriptor) -> None:
        fetch_blob(self._source, self._store, part, self._count)

    def _count(self, size: int) -> None:
        self._done += size
        if self._progress is not None:
            self._progress(self._done, self.fetched)


def fetch_blob(source: Repository, store: Store, part: Descriptor, count: Count) -> bool:
    """Have the blob in the store, checked; False if it was there. Call it under `Store.writing`."""

    def fetch(file: object) -> None:
        source.fetch(part.digest, part.size, file, count)  # type: ignore[arg-type]

    fetched = store.receive(part.digest, part.size, fetch, source.transport.stop)
    if not fetched:
        source.transport.check_stopped()
        count(part.size)
    return fetched


def _keep(store: Store, extra: Listed) -> Attached:
    """The attached manifest in the store, with the contents that it names; these are there."""
    store.put(extra.data)
    blobs = {}
    for part in extra.document.parts:
        data = store.blob(part.digest).read_bytes()
        if oci.digest_of(data) != part.digest:
            raise BundleError("blob-digest", f"attached: expected {part.digest}", where=str(store.path))
        blobs[part.digest] = data
    return attachments.with_blobs(extra.data, extra.document, blobs)


def _is_record(extra: Attached) -> bool:
    try:
        decode_json(extra.layers[0].data, dict[str, object], "provenance")
    except BundleError:
        return False
    return True


def _check_room(store: Store, size: int) -> None:
    """Raise PrecastError (`disk-full`) before anything is fetched that can't be kept."""
    free = shutil.disk_usage(store.path).free
    if size > free:
        message = f"{size} bytes are to be fetched, and there is room for {free}"
        fix = "free some space (precast store gc), or name another place in PRECAST_STORE"
        raise PrecastError("disk-full", message, where=str(store.path), fix=fix)


def resolve(reference: str | Reference, *, plain_http: bool = False) -> Reference:
    """The reference with the digest that its tag has now, by one request; with a digest as it is, without any.

    Raises RegistryError.
    """
    wanted = Reference.parse(reference) if isinstance(reference, str) else reference
    if wanted.digest is not None:
        return wanted
    source = Repository(wanted, plain_http=plain_http)
    try:
        return wanted.at(source.resolve(wanted.tag or "latest"))
    except RegistryError as error:
        raise error.inside(str(wanted)) from None
    finally:
        source.transport.close()
