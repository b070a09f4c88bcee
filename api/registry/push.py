"""A bundle to a registry: blobs first, then manifests, tags last, and all of it asked for again."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec

from precast.ir.artifact import Bundle
from precast.ir.bundle import oci
from precast.ir.bundle.attached import Attached
from precast.ir.bundle.layout import Survey, survey
from precast.ir.errors import BundleError, RegistryError
from precast.registry import referrers
from precast.registry.client import Count, Repository, Upload
from precast.registry.image import Image, image_of
from precast.registry.reference import Reference
from precast.registry.workers import each

WORKERS = 4
Progress = Callable[[int, int], object]
"""Called with the bytes that are done and the bytes in all."""


class Blob(msgspec.Struct, frozen=True):
    """A blob to be there, and how its content is opened."""

    digest: str
    size: int
    open: Callable[[], BinaryIO]


class Pushed(msgspec.Struct, frozen=True):
    """What a push did. `reference` names the bundle by digest; `tag` is the tag that leads to it, or None.

    Blobs are `uploaded`, were `present`, or were `mounted` from another repository; `uploaded_bytes` counts the first.
    `attached` are the digests of the attached manifests that went along.
    """

    reference: str
    digest: str
    tag: str | None
    uploaded: int
    present: int
    mounted: int
    uploaded_bytes: int
    attached: tuple[str, ...]


def push(
    bundle: str | os.PathLike[str] | Bundle,
    reference: str | Reference,
    *,
    as_image: bool = False,
    mount_from: Sequence[str] = (),
    plain_http: bool = False,
    progress: Progress | None = None,
    repository: Repository | None = None,
) -> Pushed:
    """Push the bundle at a path, or one that is opened, and what is attached to it, with the digest that it has.

    `reference` may have a tag, which is written last, and a digest, which must be the bundle's. `as_image`: as an image
    with one layer, for runtimes that mount images only. `mount_from`: repositories of the same registry that have some
    of the blobs. `repository` takes the place of connections made here.

    Raises BundleError for a bundle that is refused, and RegistryError.
    """
    wanted = Reference.parse(reference) if isinstance(reference, str) else reference
    opened = bundle if isinstance(bundle, Bundle) else Bundle.open_whole(bundle)
    path, digest = opened.path, opened.digest
    del opened  # of which little is needed here, and much may be held
    found = survey(path)
    if found.descriptor.digest != digest:
        message = f"expected {digest}, which was opened, found {found.descriptor.digest}"
        raise BundleError("blob-digest", message, where=str(path), fix="the bundle was replaced: push the new one")
    if wanted.digest not in (None, digest) and not as_image:
        message = f"the bundle is {digest}, the reference says {wanted.digest}"
        raise RegistryError("reference-invalid", message, where=str(wanted))
    target = repository or Repository(wanted, writes=True, mounted=mount_from, plain_http=plain_http)
    try:
        if as_image:
            return _push_image(target, image_of(path, found), mount_from, progress)
        return _push_bundle(target, path, found, mount_from, progress)
    finally:
        if repository is None:
            target.transport.close()


def _push_bundle(
    repository: Repository, path: Path, found: Survey, mount_from: Sequence[str], progress: Progress | None
) -> Pushed:
    blobs = {part.digest: Blob(part.digest, part.size, _opener(path, part.digest)) for part in found.parts}
    for extra in found.attached:
        for digest, data in extra.blobs().items():
            if digest != extra.digest:
                blobs.setdefault(digest, Blob(digest, len(data), _opener(path, digest)))
    states = upload_all(repository, list(blobs.values()), mount_from, progress)
    image = found.descriptor
    repository.put_manifest(image.digest, found.image, oci.IMAGE_TYPE)
    unlisted = referrers.put_all(repository, image, found.attached)
    manifests = [found.image, *(extra.manifest for extra in found.attached)]
    every = list(blobs.values())
    sent = [blob for blob, state in zip(every, states, strict=True) if state != "present"]
    _confirm_all(repository, sent, manifests, lambda: referrers.list_by_tag(repository, image.digest, unlisted))
    return _finished(repository, image.digest, found.image, oci.IMAGE_TYPE, every, states, found.attached)


def _push_image(repository: Repository, image: Image, mount_from: Sequence[str], progress: Progress | None) -> Pushed:
    blobs = [Blob(digest, size, opened) for digest, size, opened in image.blobs]
    states = upload_all(repository, blobs, mount_from, progress)
    for data in image.manifests:
        repository.put_manifest(oci.digest_of(data), data, oci.IMAGE_TYPE)
    digest = oci.digest_of(image.top)
    repository.put_manifest(digest, image.top, oci.INDEX_TYPE)
    _confirm_all(repository, blobs, [*image.manifests, image.top], lambda: None)
    return _finished(repository, digest, image.top, oci.INDEX_TYPE, blobs, states, ())


def _finished(
    repository: Repository,
    digest: str,
    manifest: bytes,
    media_type: str,
    blobs: Sequence[Blob],
    states: Sequence[str],
    attached: tuple[Attached, ...],
) -> Pushed:
    """Write the tag, now that all it leads to is there, and say what was done."""
    tag = repository.reference.tag
    if tag is not None:
        repository.put_manifest(tag, manifest, media_type)
        if (now := repository.resolve(tag)) != digest:
            message = f"the tag leads to {now}, and not to {digest}, which was pushed under it"
            fix = "push again, or let nobody else push under this tag"
            raise RegistryError("registry-changed", message, where=str(repository.reference), fix=fix)
    sent = sum(blob.size for blob, state in zip(blobs, states, strict=True) if state == "uploaded")
    counts = (states.count("uploaded"), states.count("present"), states.count("mounted"))
    bare = Reference(repository.reference.host, repository.reference.name, digest=digest)
    return Pushed(str(bare), digest, tag, *counts, sent, tuple(extra.digest for extra in attached))


def upload_all(
    repository: Repository, blobs: Sequence[Blob], mount_from: Sequence[str], progress: Progress | None = None
) -> list[str]:
    """Have each blob at the registry: `present`, `mounted` or `uploaded`, in the order of `blobs`.

    Raises RegistryError and BundleError.
    """
    total, done = sum(blob.size for blob in blobs), [0]

    def count(size: int) -> None:
        done[0] += size
        if progress is not None:
            progress(done[0], total)

    def one(blob: Blob) -> str:
        return _upload(repository, blob, mount_from, count)

    largest_first = sorted(range(len(blobs)), key=lambda index: -blobs[index].size)
    states = each([blobs[index] for index in largest_first], one, repository.transport, WORKERS)
    return [state for _, state in sorted(zip(largest_first, states, strict=True))]


def _upload(repository: Repository, blob: Blob, mount_from: Sequence[str], count: Count) -> str:
    if repository.has_blob(blob.digest, blob.size):
        count(blob.size)
        return "present"

    def content() -> Upload:
        return Upload(blob.open(), blob.digest, blob.size, repository.transport, count)

    state = repository.upload(blob.digest, blob.size, content, mount_from)
    if state == "mounted":
        count(blob.size)
    return state


def _opener(path: Path, digest: str) -> Callable[[], BinaryIO]:
    file = path / oci.blob_path(digest)

    def opened() -> BinaryIO:
        try:
            return open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0)
        except OSError as error:
            raise BundleError("bundle-unreadable", f"{error.strerror}", where=str(file)) from None

    return opened


def _confirm_all(
    repository: Repository, blobs: Sequence[Blob], manifests: Sequence[bytes], beside: Callable[[], None]
) -> None:
    """Ask for all that was sent, and meanwhile do what else is to be done.

    Raises RegistryError (`registry-changed`) where the registry doesn't have it, or gives something else back.
    """

    def blob_is_there(blob: Blob) -> None:
        if not repository.has_blob(blob.digest, blob.size):
            message = f"the registry took {blob.digest}, and does not have it"
            raise RegistryError("registry-changed", message, where=str(repository.reference))

    def manifest_is_there(data: bytes) -> None:
        if repository.manifest(oci.digest_of(data)).data != data:
            message = f"what the registry gives back under {oci.digest_of(data)} is not what was pushed"
            raise RegistryError("registry-changed", message, where=str(repository.reference))

    steps: list[Callable[[], None]] = [beside]
    steps += [partial(manifest_is_there, data) for data in manifests]
    steps += [partial(blob_is_there, blob) for blob in blobs]
    each(steps, lambda step: step(), repository.transport, WORKERS)
