"""Manifests that are attached to a bundle from outside: its provenance record, signatures, attestations, links.

Each is an OCI image manifest whose `subject` is the bundle's image manifest; the bundle's digest does not depend on
it. But for the provenance record they are other tools' documents: fields that this format does not know are passed
over, as OCI asks, and nothing in them changes what the bundle is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from precast.ir import limits
from precast.ir.bundle import oci
from precast.ir.bundle.codec import decode_foreign_json, encode_json
from precast.ir.bundle.oci import Descriptor
from precast.ir.errors import BundleError, shown

_FIX = (
    "remove some by precast.ir.artifact.detach(BUNDLE, DIGEST, ...); their digests are those that "
    "`precast inspect BUNDLE --json` has as `attached`"
)


class AttachedLayer(msgspec.Struct, frozen=True):
    """A layer of an attached manifest, with its content."""

    media_type: str
    digest: str
    data: bytes
    annotations: dict[str, str] = {}


class Attached(msgspec.Struct, frozen=True):
    """An attached manifest: its digest and its bytes, what it says, and the contents of the blobs that it names.

    `artifact_type` is the config's media type where the manifest has none of its own, as OCI rules.
    """

    digest: str
    manifest: bytes
    artifact_type: str
    annotations: dict[str, str]
    config: bytes
    layers: tuple[AttachedLayer, ...]

    def blobs(self) -> dict[str, bytes]:
        """The contents of the manifest and of all that it names, by digest."""
        return {
            self.digest: self.manifest,
            oci.digest_of(self.config): self.config,
            **{layer.digest: layer.data for layer in self.layers},
        }


class Part(msgspec.Struct, frozen=True, rename="camel"):
    """A descriptor as others write it. `urls` and `data` are not looked at: a blob is what its digest says."""

    media_type: str
    digest: str
    size: int
    artifact_type: str | None = None
    annotations: dict[str, str] | None = None


class Document(msgspec.Struct, frozen=True, rename="camel"):
    """An image manifest as others write it."""

    schema_version: int
    config: Part
    layers: tuple[Part, ...]
    media_type: str | None = None
    artifact_type: str | None = None
    subject: Part | None = None
    annotations: dict[str, str] | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """The blobs that it names."""
        return (self.config, *self.layers)

    @property
    def type(self) -> str:
        """The artifact type."""
        return self.artifact_type or self.config.media_type

    def subject_digest(self) -> str | None:
        """The digest of the manifest that it is attached to."""
        return None if self.subject is None else self.subject.digest


def decode(data: bytes) -> Document:
    """The image manifest in these bytes, with or without a subject.

    Raises BundleError: `json-invalid`, `json-duplicate-key`, `limit-exceeded` or `image-invalid`.
    """
    what = "image manifest"
    document = decode_foreign_json(data, Document, what, limits.MAX_JSON_BYTES)
    if document.schema_version != 2 or (document.media_type or oci.IMAGE_TYPE) != oci.IMAGE_TYPE:
        found = f"{document.schema_version}, {shown(str(document.media_type))}"
        message = f"{what}: expected schemaVersion 2, mediaType {oci.IMAGE_TYPE}, found {found}"
        raise BundleError("image-invalid", message)
    return document


def check(document: Document, bundle: Descriptor) -> None:
    """Raise BundleError unless the manifest belongs to this bundle, and all that it names fits the format's limits.

    `bundle` describes the image manifest. Codes: `index-invalid`, `artifact-type`, `digest-invalid`,
    `blob-size`, `limit-exceeded`.
    """
    subject = document.subject
    if subject is None or (subject.media_type, subject.digest, subject.size) != (
        oci.IMAGE_TYPE, bundle.digest, bundle.size,
    ):  # fmt: skip
        raise BundleError("index-invalid", "attached manifest: its subject is not this bundle")
    if document.type == oci.BUNDLE:
        raise BundleError("artifact-type", "attached manifest: expected anything but a bundle")
    if len(document.layers) > limits.MAX_LAYERS:
        message = f"attached manifest: {len(document.layers)} layers; at most {limits.MAX_LAYERS} are allowed"
        raise BundleError("limit-exceeded", message)
    for part in document.parts:
        oci.check_digest(part.digest, part.size, "attached blob")


def check_together(documents: Sequence[Document]) -> None:
    """Raise BundleError (`limit-exceeded`) where attached manifests are too many, or name too many bytes."""
    if len(documents) > limits.MAX_ATTACHED:
        message = f"{len(documents)} attached manifests; at most {limits.MAX_ATTACHED} are allowed"
        raise BundleError("limit-exceeded", message, fix=_FIX)
    total = sum(part.size for document in documents for part in document.parts)
    if total > limits.MAX_ATTACHED_BYTES:
        message = f"{total} bytes in blobs of attached manifests; at most {limits.MAX_ATTACHED_BYTES} are allowed"
        raise BundleError("limit-exceeded", message, fix=_FIX)


def with_blobs(manifest: bytes, document: Document, blobs: Mapping[str, bytes]) -> Attached:
    """The attached manifest with the contents that it names, which are looked up by digest."""
    layers = tuple(
        AttachedLayer(part.media_type, part.digest, blobs[part.digest], part.annotations or {})
        for part in document.layers
    )
    config = blobs[document.config.digest]
    return Attached(
        oci.digest_of(manifest), manifest, document.type, document.annotations or {}, config, layers
    )  # fmt: skip


def compose(
    bundle: Descriptor,
    artifact_type: str,
    layers: Sequence[tuple[str, bytes]],
    annotations: Mapping[str, str] | None = None,
) -> Attached:
    """A new manifest attached to the bundle: `layers` of (media type, content), under an empty config.

    `bundle` describes the image manifest (`Bundle.descriptor`). The bytes depend on the arguments alone.
    """
    described = tuple(oci.describe(data, media_type) for media_type, data in layers)
    subject = Descriptor(oci.IMAGE_TYPE, bundle.digest, bundle.size)
    empty = oci.describe(oci.EMPTY, oci.EMPTY_TYPE)
    image: Any = oci.Image(
        artifact_type, empty, described, oci.IMAGE_TYPE, 2, subject, dict(annotations or {})
    )  # fmt: skip
    manifest = encode_json(image)
    contents = {oci.digest_of(data): data for data in (oci.EMPTY, *(data for _, data in layers))}
    return with_blobs(manifest, decode(manifest), contents)
