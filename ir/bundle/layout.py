"""Reading a bundle's directory: every file once, its size before its digest, and no file that nothing refers to.

Nothing here decodes a graph or a manifest; what comes out are bytes that are what their digests say. No digest or
name becomes a path before its form is checked.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from precast.ir import limits
from precast.ir.bundle import oci
from precast.ir.bundle.codec import decode_foreign_json, decode_json
from precast.ir.bundle.directory import Directory, opened
from precast.ir.bundle.oci import Descriptor, Image, Index
from precast.ir.errors import BundleError, shown

_ROOT_NAMES = frozenset((oci.LAYOUT_FILE, oci.INDEX_FILE, oci.BLOBS))
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_LAYER_LIMITS = {
    oci.GRAPH: limits.MAX_GRAPH_BYTES,
    oci.CONSTANTS: limits.MAX_CONSTANTS_BYTES,
    oci.TOKENIZER: limits.MAX_TOKENIZER_BYTES,
}


class Layer(msgspec.Struct, frozen=True):
    """A layer of the bundle: its media type, the name it goes by, and its content."""

    media_type: str
    name: str
    digest: str
    data: bytes


class Contents(msgspec.Struct, frozen=True):
    """A layout as it was read: the image manifest's digest, and the bytes of all that it and its provenance name."""

    digest: str
    config: bytes
    layers: tuple[Layer, ...]
    provenance: bytes | None


def read_layout(path: Path) -> Contents:
    """Read the bundle at `path`, completely and strictly.

    Raises BundleError: `bundle-missing`, `bundle-not-a-directory`, `layout-*`, `index-invalid`, `image-invalid`,
    `artifact-type`, `media-type`, `digest-invalid`, `name-invalid`, `blob-*`, `json-*` or `limit-exceeded`.
    """
    for _ in range(3):
        with opened(path) as root:
            try:
                return _read(root)
            except BundleError as error:
                if not root.was_replaced(path):
                    raise error.inside(str(path)) from None
        # A build published here and removed the bundle that was being read: read the one that took its place.
    raise BundleError("bundle-missing", "the bundle is replaced faster than it can be read", where=str(path))


def is_bundle(path: Path) -> bool:
    """Whether `path` is a directory that a bundle was written to, and holds nothing beside it.

    Its blobs may be damaged or missing: a bundle that doesn't open is still ours to replace.
    """
    try:
        with opened(path) as root, root.entered(oci.BLOBS) as blobs, blobs.entered(oci.ALGORITHM) as files:
            root.refuse_extra(_ROOT_NAMES)
            manifests = _read_index(root).manifests
            return bool(manifests) and all(_is_ours(files, descriptor) for descriptor in manifests)
    except BundleError:
        return False


def check_file_name(name: str) -> None:
    """Raise BundleError (`name-invalid`) unless `name` is a plain file name: no separators, no leading dot."""
    if not _FILE_NAME.fullmatch(name) or len(name) > limits.MAX_FILE_NAME_BYTES:
        message = f"expected a name of letters, digits, '_', '-' and '.', at most {limits.MAX_FILE_NAME_BYTES} long"
        raise BundleError("name-invalid", f"{message}, found {name[:200]!r}")


# --- documents -------------------------------------------------------------------------------------------------


def _read(root: Directory) -> Contents:
    _check_marker(root)  # first: what lies in a directory that is no bundle is nobody's mistake
    root.refuse_extra(_ROOT_NAMES)
    index = _read_index(root)
    with root.entered(oci.BLOBS) as blobs:
        blobs.refuse_extra({oci.ALGORITHM})
        with blobs.entered(oci.ALGORITHM) as files:
            digest, image, attached = _read_images(files, index)
            referenced = [part for each in (image, *attached) for part in (each.config, *each.layers)]
            names = {oci.blob_name(part, "blob") for part in (*index.manifests, *referenced)}
            files.refuse_extra(names)
            if sum(part.size for part in referenced) > limits.MAX_BUNDLE_BYTES:
                message = f"more than {limits.MAX_BUNDLE_BYTES} bytes in all blobs together"
                raise BundleError("limit-exceeded", message)
            return Contents(digest, *_read_parts(files, image, attached))


def _read_parts(files: Directory, image: Image, attached: list[Image]) -> tuple[bytes, tuple[Layer, ...], bytes | None]:
    config = _read_blob(files, image.config, "manifest", limits.MAX_JSON_BYTES)
    layers = []
    for part in image.layers:
        name = _layer_name(part)
        data = _read_blob(files, part, name, _LAYER_LIMITS[part.media_type])
        layers.append(Layer(part.media_type, name, part.digest, data))
    record = None
    for extra in attached:
        _read_blob(files, extra.config, "provenance config", len(oci.EMPTY))
        record = _read_blob(files, extra.layers[0], "provenance", limits.MAX_JSON_BYTES)
    return config, tuple(layers), record


def _check_marker(root: Directory) -> None:
    if not root.holds(oci.LAYOUT_FILE):
        message = f"expected a bundle, found a directory without {oci.LAYOUT_FILE}"
        raise BundleError("layout-missing", message, fix="name a bundle's directory, which `precast build` makes")
    data = root.read(oci.LAYOUT_FILE, limits.MAX_MARKER_BYTES)
    expected = decode_json(oci.MARKER, dict[str, str], oci.LAYOUT_FILE)
    if decode_foreign_json(data, dict[str, str], oci.LAYOUT_FILE, limits.MAX_MARKER_BYTES) != expected:
        raise BundleError("layout-marker", f"{oci.LAYOUT_FILE}: expected {oci.MARKER.decode()}")


def _read_index(root: Directory) -> Index:
    data = root.read(oci.INDEX_FILE, limits.MAX_INDEX_BYTES)
    index = decode_foreign_json(data, Index, oci.INDEX_FILE, limits.MAX_INDEX_BYTES)
    if index.schema_version != 2:
        raise BundleError("index-invalid", f"{oci.INDEX_FILE}: expected schemaVersion 2, found {index.schema_version}")
    _expect("media-type", oci.INDEX_FILE, index.media_type or oci.INDEX_TYPE, oci.INDEX_TYPE)
    if len(index.manifests) > 2:  # before each of them is read
        raise _not_one(f"{len(index.manifests)} manifests")
    return index


def _not_one(found: str) -> BundleError:
    message = f"{oci.INDEX_FILE}: expected one bundle and at most one provenance record, found {found}"
    return BundleError("index-invalid", message)


def _read_images(files: Directory, index: Index) -> tuple[str, Image, list[Image]]:
    """The digest and the image manifest of the bundle, and the manifests attached to it: provenance or none."""
    images = [(descriptor, _read_image(files, descriptor)) for descriptor in index.manifests]
    own = [(descriptor, image) for descriptor, image in images if image.subject is None]
    attached = [image for _, image in images if image.subject is not None]
    if len(own) != 1 or len(attached) > 1:
        raise _not_one(f"{len(own)} and {len(attached)}")
    ((descriptor, image),) = own
    _check_image(image)
    for extra in attached:
        _check_provenance(extra, descriptor)
    return descriptor.digest, image, attached


def _read_image(files: Directory, descriptor: Descriptor) -> Image:
    what = "image manifest"
    _expect("media-type", oci.INDEX_FILE, descriptor.media_type, oci.IMAGE_TYPE)
    image = decode_json(_read_blob(files, descriptor, what, limits.MAX_JSON_BYTES), Image, what)
    if descriptor.artifact_type is not None:
        _expect("artifact-type", oci.INDEX_FILE, descriptor.artifact_type, image.artifact_type)
    if image.schema_version != 2 or image.media_type != oci.IMAGE_TYPE or image.annotations:
        message = f"{what}: expected schemaVersion 2, mediaType {oci.IMAGE_TYPE} and no annotations"
        raise BundleError("image-invalid", message)
    return image


def _check_image(image: Image) -> None:
    _expect("artifact-type", "image manifest", image.artifact_type, oci.BUNDLE)
    _expect("media-type", "manifest", image.config.media_type, oci.MANIFEST)
    if len(image.layers) > limits.MAX_LAYERS:
        raise BundleError("limit-exceeded", f"{len(image.layers)} layers; at most {limits.MAX_LAYERS} are allowed")
    expected = [oci.GRAPH, oci.CONSTANTS, *[oci.TOKENIZER] * (len(image.layers) - 2)]
    found = [part.media_type for part in image.layers]
    if found != expected:
        message = f"layers: expected {oci.GRAPH}, {oci.CONSTANTS} and any number of {oci.TOKENIZER}"
        raise BundleError("media-type", f"{message}, found {', '.join(found[:4])[:400] or 'none'}")
    names = [_layer_name(part) for part in image.layers[2:]]
    if names != sorted(set(names)):
        raise BundleError("image-invalid", "layers: expected tokenizer files in the order of their names, each once")
    if any(part.artifact_type or part.annotations for part in (image.config, *image.layers[:2])):
        raise BundleError("image-invalid", "image manifest: expected annotations on tokenizer files only")


def _check_provenance(image: Image, bundle: Descriptor) -> None:
    _expect("artifact-type", "attached manifest", image.artifact_type, oci.PROVENANCE)
    if image.subject != Descriptor(oci.IMAGE_TYPE, bundle.digest, bundle.size):
        raise BundleError("index-invalid", "attached manifest: its subject is not this bundle")
    if image.config != oci.describe(oci.EMPTY, oci.EMPTY_TYPE):
        raise BundleError("image-invalid", f"attached manifest: expected an empty config of type {oci.EMPTY_TYPE}")
    (record, *more) = image.layers or (None,)
    if record is None or more or record != Descriptor(oci.PROVENANCE, record.digest, record.size):
        raise BundleError("image-invalid", f"attached manifest: expected one layer of type {oci.PROVENANCE}")


def _expect(code: str, what: str, found: str, expected: str) -> None:
    if found != expected:
        raise BundleError(code, f"{what}: expected {shown(expected)}, found {shown(repr(found))}")


def _layer_name(part: Descriptor) -> str:
    """What a layer goes by: a tokenizer file's title, or its role."""
    if part.media_type != oci.TOKENIZER:
        return "graph" if part.media_type == oci.GRAPH else "constants"
    if set(part.annotations) != {oci.TITLE} or part.artifact_type:
        raise BundleError("image-invalid", f"tokenizer layer: expected one annotation, {oci.TITLE}")
    check_file_name(part.annotations[oci.TITLE])
    return part.annotations[oci.TITLE]


def _is_ours(files: Directory, descriptor: Descriptor) -> bool:
    ours = (oci.BUNDLE, oci.PROVENANCE)
    # Some tools that copy layouts leave the type out of the index.
    return (descriptor.artifact_type or _read_image(files, descriptor).artifact_type) in ours


# --- blobs -----------------------------------------------------------------------------------------------------


def _read_blob(files: Directory, descriptor: Descriptor, what: str, limit: int) -> bytes:
    """A blob's content, of the size and digest that its descriptor says; `what` names it in messages."""
    name = oci.blob_name(descriptor, what)
    where = f"{oci.BLOBS}/{oci.ALGORITHM}/{name}"
    if descriptor.size > limit:
        message = f"{what}: {descriptor.size} bytes; at most {limit} are allowed"
        raise BundleError("limit-exceeded", message, where=where)
    try:
        data = files.read_exactly(name, descriptor.size)
    except BundleError as error:
        error.message = f"{what}: {error.message}"
        raise error.inside(f"{oci.BLOBS}/{oci.ALGORITHM}") from None
    found = oci.digest_of(data)
    if found != descriptor.digest:
        fix = "the file is damaged: copy or build the bundle again"
        raise BundleError("blob-digest", f"{what}: expected {descriptor.digest}, found {found}", where=where, fix=fix)
    return data
