"""What is attached to a manifest in a registry: by the referrers API, or by the tag that stands in for it.

Most registries lack the API. There an index under the tag `sha256-<hex>` lists what is attached, and who attaches
something writes it anew. It may be wrong about types, so each manifest is opened.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from precast.ir import limits
from precast.ir.bundle import attached as attachments
from precast.ir.bundle import oci
from precast.ir.bundle.attached import Attached, Document
from precast.ir.bundle.codec import decode_foreign_json
from precast.ir.bundle.layout import check_attached
from precast.ir.bundle.oci import Descriptor
from precast.ir.errors import BundleError, RegistryError, shown, some
from precast.registry.client import MAX_MANIFEST_BYTES, Repository
from precast.registry.transport import TRIES

MAX_PAGES = 16
MAX_LISTED = 1024
"""Manifests of a list that are looked at: as many as 16 pages of a registry have."""


class _Entry(msgspec.Struct, rename="camel"):
    digest: str
    size: int
    media_type: str = ""


class _List(msgspec.Struct):
    manifests: tuple[_Entry, ...] = ()


class Listed(NamedTuple):
    """An attached manifest that a bundle's layout can hold, before the blobs that it names are there."""

    data: bytes
    document: Document


def fallback_tag(digest: str) -> str:
    """The tag of the index that stands in for the referrers API."""
    return digest.replace(":", "-")


def find(repository: Repository, image: Descriptor) -> tuple[list[Listed], list[str]]:
    """The manifests that are attached to the image manifest, and of those that are passed over what and why.

    Passed over is what a bundle's layout can't hold: another subject's, damaged, or beyond the limits. A signature that
    is passed over is missing to whoever wants one; nothing else follows from it.

    Raises RegistryError.
    """
    found: list[Listed] = []
    notes: list[str] = []
    has_record = False
    for entry in _entries(repository, image.digest):
        try:
            listed = _open(repository, entry, image)
            is_record = listed.document.type == oci.PROVENANCE
            if is_record and has_record:
                raise BundleError("index-invalid", "a second provenance record")
            attachments.check_together([each.document for each in (*found, listed)])
        except BundleError as error:
            notes.append(f"passed over {shown(entry.digest)}: {error.message}")
            continue
        has_record |= is_record
        found.append(listed)
    return found, some(notes)


def publish(repository: Repository, image: Descriptor, attached: tuple[Attached, ...]) -> None:
    """Put attached manifests, whose blobs were sent, have the registry list them, and ask for all of it again.

    Raises RegistryError: `registry-changed` where a blob is not there, or the list can't be kept.
    """
    list_by_tag(repository, image.digest, put_all(repository, image, attached))
    for extra in attached:
        repository.manifest(extra.digest)
        for digest, data in extra.blobs().items():
            if digest != extra.digest and not repository.has_blob(digest, len(data)):
                message = f"the registry took {digest}, and does not have it"
                raise RegistryError("registry-changed", message, where=str(repository.reference))


def put_all(repository: Repository, image: Descriptor, attached: tuple[Attached, ...]) -> list[Attached]:
    """Put attached manifests, whose blobs are there; those that the registry doesn't list by itself.

    Raises RegistryError.
    """
    unlisted = []
    for extra in attached:
        headers = repository.put_manifest(extra.digest, extra.manifest, oci.IMAGE_TYPE)
        if headers.get("OCI-Subject") != image.digest:  # by which a registry says that it lists what is attached
            unlisted.append(extra)
    return unlisted


def _entries(repository: Repository, digest: str) -> list[_Entry]:
    """What the registry lists, each manifest once."""
    found: dict[str, _Entry] = {}
    data, page = repository.referrers(digest)
    for _ in range(MAX_PAGES):
        if data is None:
            break
        found.update((entry.digest, entry) for entry in decode_list(data))
        if page is None:
            break
        data, page = repository.referrers(digest, page)
    if not found and (index := repository.manifest_or_none(fallback_tag(digest))) is not None:
        found.update((entry.digest, entry) for entry in decode_list(index.data))
    if len(found) > MAX_LISTED:
        message = f"lists {len(found)} manifests attached to {digest}; at most {MAX_LISTED} are looked at"
        raise RegistryError("registry-answer", message, where=str(repository.reference))
    return sorted(found.values(), key=lambda entry: entry.digest)


def decode_list(data: bytes) -> tuple[_Entry, ...]:
    """The manifests that a list names. Raises RegistryError (`registry-answer`)."""
    try:
        return decode_foreign_json(data, _List, "list of attached manifests", MAX_MANIFEST_BYTES).manifests
    except BundleError as error:
        raise RegistryError("registry-answer", error.message) from None


def _open(repository: Repository, entry: _Entry, image: Descriptor) -> Listed:
    oci.check_digest(entry.digest, entry.size, "attached manifest")
    if entry.media_type != oci.IMAGE_TYPE:
        raise BundleError("media-type", f"expected {oci.IMAGE_TYPE}, found {shown(entry.media_type)}")
    if entry.size > limits.MAX_JSON_BYTES:
        message = f"{entry.size} bytes; at most {limits.MAX_JSON_BYTES} are allowed"
        raise BundleError("limit-exceeded", message)
    try:
        data = repository.manifest(entry.digest, limits.MAX_JSON_BYTES).data
    except RegistryError as error:
        if error.code in ("registry-missing", "registry-answer"):
            raise BundleError("blob-missing", error.message) from None
        raise
    document = attachments.decode(data)
    check_attached(data, document, image)
    return Listed(data, document)


def list_by_tag(repository: Repository, digest: str, unlisted: list[Attached]) -> None:
    """Add to the index under the tag, read it back, and begin anew if somebody else wrote it between.

    Raises RegistryError: `registry-changed` where others write it all the time.
    """
    if not unlisted:
        return
    tag = fallback_tag(digest)
    for _ in range(TRIES):
        found = repository.manifest_or_none(tag)
        document = index_of(found.data if found else None)
        known = {entry.get("digest") for entry in document["manifests"]}
        missing = [extra for extra in unlisted if extra.digest not in known]
        if not missing:
            return
        document["manifests"] += [_describe(extra) for extra in missing]
        try:
            repository.put_manifest(
                tag, msgspec.json.encode(document), oci.INDEX_TYPE, etag=found.etag if found else None
            )
        except RegistryError as error:
            if error.code != "registry-changed":
                raise
    message = f"the list under the tag {tag} changes faster than it can be added to"
    fix = "push again when nobody else does"
    raise RegistryError("registry-changed", message, where=str(repository.reference), fix=fix)


def index_of(data: bytes | None) -> dict[str, Any]:
    """The index as plain data: what others put there stays as it is. Raises RegistryError (`registry-answer`)."""
    if data is None:
        return {"schemaVersion": 2, "mediaType": oci.INDEX_TYPE, "manifests": []}
    try:
        document = decode_foreign_json(data, dict[str, Any], "list of attached manifests", MAX_MANIFEST_BYTES)
    except BundleError as error:
        raise RegistryError("registry-answer", error.message) from None
    entries = document.get("manifests")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise RegistryError("registry-answer", "the list of attached manifests is no index")
    return document


def _describe(extra: Attached) -> dict[str, Any]:
    described: dict[str, Any] = {
        "mediaType": oci.IMAGE_TYPE,
        "digest": extra.digest,
        "size": len(extra.manifest),
        "artifactType": extra.artifact_type,
    }
    return described | ({"annotations": extra.annotations} if extra.annotations else {})
