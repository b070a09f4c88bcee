"""The OCI image layout as far as a bundle uses it: documents, media types, digests.

`index.json` lists the bundle's image manifest and, attached to it by `subject`, manifests of its provenance record,
of signatures and the like. The image manifest's digest is the bundle's identity; what is attached lies outside of it.
"""

from __future__ import annotations

import hashlib
import re

import msgspec

from precast.ir.errors import BundleError

LAYOUT_FILE, INDEX_FILE, BLOBS = "oci-layout", "index.json", "blobs"
ALGORITHM = "sha256"
MARKER = b'{"imageLayoutVersion":"1.0.0"}'

INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
IMAGE_TYPE = "application/vnd.oci.image.manifest.v1+json"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
EMPTY = b"{}"

BUNDLE = "application/vnd.precast.bundle.v1"
MANIFEST = "application/vnd.precast.manifest.v1+json"
GRAPH = "application/vnd.precast.graph.v1.msgpack+zstd"
CONSTANTS = "application/vnd.precast.constants.v1.safetensors"
TOKENIZER = "application/vnd.precast.tokenizer.v1"
NATIVE = "application/vnd.precast.native.v1.msgpack+zstd"
CHOICES = "application/vnd.precast.choices.v1+json"
PROVENANCE = "application/vnd.precast.provenance.v1+json"

TITLED = (TOKENIZER, NATIVE)
"""Layers of which a bundle may have several; each has its name as its `TITLE`."""
TITLE = "org.opencontainers.image.title"
REF_NAME = "org.opencontainers.image.ref.name"
# By this annotation of the image's entry `cosign verify --local-image` finds what was signed.
KIND, SIGNED_IMAGE = "kind", "dev.cosignproject.cosign/image"

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, rename="camel"):
    """What OCI documents share: camel-case fields, no others, defaults left out."""


class Descriptor(_Document, frozen=True):
    """A blob: its media type, digest and size in bytes."""

    media_type: str
    digest: str
    size: int
    artifact_type: str | None = None
    annotations: dict[str, str] = {}


class Image(_Document, frozen=True):
    """An image manifest; with a `subject`, it belongs to that manifest."""

    artifact_type: str
    config: Descriptor
    layers: tuple[Descriptor, ...]
    media_type: str
    schema_version: int
    subject: Descriptor | None = None
    annotations: dict[str, str] = {}


class Index(_Document, frozen=True):
    """`index.json`. Tools that copy a layout rewrite it, some without the media type."""

    manifests: tuple[Descriptor, ...]
    schema_version: int
    media_type: str = ""
    annotations: dict[str, str] = {}


def digest_of(data: bytes) -> str:
    """The digest of a blob: `sha256:` and 64 lower-case hexadecimal digits."""
    return f"{ALGORITHM}:{hashlib.sha256(data).hexdigest()}"


def describe(
    data: bytes, media_type: str, *, artifact_type: str | None = None, annotations: dict[str, str] | None = None
) -> Descriptor:
    """The descriptor of a blob."""
    return Descriptor(media_type, digest_of(data), len(data), artifact_type, annotations or {})


def image(
    artifact_type: str, config: Descriptor, layers: tuple[Descriptor, ...], subject: Descriptor | None = None
) -> Image:
    """An image manifest of the one version that there is."""
    return Image(artifact_type, config, layers, IMAGE_TYPE, 2, subject)


def check_digest(digest: str, size: int, what: str) -> None:
    """Raise BundleError (`digest-invalid`, `blob-size`) unless these can be a blob's; before any becomes a path."""
    if not _DIGEST.fullmatch(digest):
        message = f"{what}: expected sha256: and 64 hexadecimal digits, found {digest[:100]!r}"
        raise BundleError("digest-invalid", message)
    if size < 0:
        raise BundleError("blob-size", f"{what}: expected a size, found {size} bytes")


def blob_name(descriptor: Descriptor, what: str) -> str:
    """The name of the blob's file below `blobs/sha256`.

    Raises BundleError (`digest-invalid`, `blob-size`) before any digest is used as a path.
    """
    check_digest(descriptor.digest, descriptor.size, what)
    return descriptor.digest.removeprefix("sha256:")


def blob_path(digest: str) -> str:
    """The path of a blob in a layout, from its top."""
    return f"{BLOBS}/{digest.replace(':', '/')}"
