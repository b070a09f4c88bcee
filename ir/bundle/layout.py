"""Reading a bundle's directory: every file once, its size before its digest, and no file that nothing refers to.

Nothing here decodes a graph or a manifest; what comes out are bytes that are what their digests say. No digest or
name becomes a path before its form is checked.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from precast.ir import limits
from precast.ir.bundle import attached as attachments
from precast.ir.bundle import oci
from precast.ir.bundle.attached import Attached, Document
from precast.ir.bundle.codec import decode_foreign_json, decode_json, encode_json
from precast.ir.bundle.directory import Directory, opened
from precast.ir.bundle.oci import Descriptor, Image, Index
from precast.ir.errors import BundleError, shown

_ROOT_NAMES = frozenset((oci.LAYOUT_FILE, oci.INDEX_FILE, oci.BLOBS))
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_LAYER_LIMITS = {
    oci.GRAPH: limits.MAX_GRAPH_BYTES,
    oci.CONSTANTS: limits.MAX_CONSTANTS_BYTES,
    oci.TOKENIZER: limits.MAX_TOKENIZER_BYTES,
    oci.NATIVE: limits.MAX_NATIVE_BYTES,
}


class Layer(msgspec.Struct, frozen=True):
    """A layer of the bundle: its media type, the name it goes by, its digest, and its size in bytes."""

    media_type: str
    name: str
    digest: str
    size: int


class Contents(msgspec.Struct, frozen=True):
    """A layout as it was read: the image manifest, and the bytes of what it and what is attached to it name.

    `descriptor` is the image manifest's type, digest and size. `held` has the contents of the layers by digest, but for
    those of native layers, which were held against their digests and are read when they are wanted (`read_layer`). The
    provenance record is among what is attached.
    """

    descriptor: Descriptor
    image: bytes
    config: bytes
    layers: tuple[Layer, ...]
    held: dict[str, bytes]
    provenance: bytes | None
    attached: tuple[Attached, ...]


class Survey(msgspec.Struct, frozen=True):
    """A layout of which the manifests were read, and of the bundle's own blobs nothing but that they are there.

    `parts` describes these: the manifest and the layers. What copies a bundle checks their digests as it goes.
    """

    descriptor: Descriptor
    image: bytes
    parts: tuple[Descriptor, ...]
    attached: tuple[Attached, ...]


def survey(path: Path) -> Survey:
    """What is in the bundle at `path`, in little memory however large its layers are.

    Raises what `read_layout` does, but for what only the content of the layers would show.
    """
    with opened(path) as root:
        try:
            _check_marker(root)
            index = decode_index(_read_index(root))
            with root.entered(oci.BLOBS) as blobs, blobs.entered(oci.ALGORITHM) as files:
                return _survey(files, index)
        except BundleError as error:
            raise error.inside(str(path)) from None


def survey_shared(path: Path, index: bytes) -> Survey:
    """The same, of the bundle that `index` lists, from a directory of many bundles' blobs."""
    with opened(path) as root, root.entered(oci.BLOBS) as blobs, blobs.entered(oci.ALGORITHM) as files:
        try:
            return _survey(files, decode_index(index))
        except BundleError as error:
            raise error.inside(str(path)) from None


def _survey(files: Directory, index: Index) -> Survey:
    descriptor, data, extras = _read_images(files, index)
    image = decode_image(data)
    attached = tuple(_read_attached(files, *extra) for extra in extras)
    return Survey(descriptor, data, (image.config, *image.layers), attached)


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


def read_shared(path: Path, index: bytes) -> Contents:
    """Read the bundle that `index` (the content of an `index.json`) lists, from a directory of many bundles' blobs.

    Raises what `read_layout` does; blobs that the bundle does not name are nobody's matter.
    """
    with opened(path) as root, root.entered(oci.BLOBS) as blobs, blobs.entered(oci.ALGORITHM) as files:
        try:
            return _read_contents(files, decode_index(index), whole=False)
        except BundleError as error:
            raise error.inside(str(path)) from None


def is_bundle(path: Path) -> bool:
    """Whether `path` is a directory that a bundle was written to, and holds nothing beside it but what is attached.

    Its blobs may be damaged or missing: a bundle that doesn't open is still ours to replace.
    """
    try:
        with opened(path) as root, root.entered(oci.BLOBS) as blobs, blobs.entered(oci.ALGORITHM) as files:
            root.refuse_extra(_ROOT_NAMES)
            manifests = decode_index(_read_index(root)).manifests
            types = {part.digest: _type_of(files, part) for part in manifests}
            own = {digest for digest, type in types.items() if type == oci.BUNDLE}
            return bool(own) and all(
                types[part.digest] in (oci.BUNDLE, oci.PROVENANCE) or _subject_of(files, part) in own
                for part in manifests
            )
    except BundleError:
        return False


def compose_index(image: Descriptor, attached: tuple[Attached, ...]) -> bytes:
    """`index.json` of a bundle: its image manifest, and what is attached to it in the order of its digests."""
    annotations = {oci.REF_NAME: "latest"}  # tools want a name when a layout holds more than one manifest
    if any(extra.artifact_type != oci.PROVENANCE for extra in attached):
        annotations[oci.KIND] = oci.SIGNED_IMAGE
    entries = [Descriptor(oci.IMAGE_TYPE, image.digest, image.size, oci.BUNDLE, annotations)]
    for extra in sorted(attached, key=lambda extra: (extra.artifact_type != oci.PROVENANCE, extra.digest)):
        entries.append(Descriptor(oci.IMAGE_TYPE, extra.digest, len(extra.manifest), extra.artifact_type))
    return encode_json(Index(tuple(entries), 2, oci.INDEX_TYPE))


def check_file_name(name: str) -> None:
    """Raise BundleError (`name-invalid`) unless `name` is a plain file name: no separators, no leading dot."""
    if not _FILE_NAME.fullmatch(name) or len(name) > limits.MAX_FILE_NAME_BYTES:
        message = f"expected a name of letters, digits, '_', '-' and '.', at most {limits.MAX_FILE_NAME_BYTES} long"
        raise BundleError("name-invalid", f"{message}, found {name[:200]!r}")


# --- documents -------------------------------------------------------------------------------------------------


def _read(root: Directory) -> Contents:
    _check_marker(root)  # first: what lies in a directory that is no bundle is nobody's mistake
    root.refuse_extra(_ROOT_NAMES)
    index = decode_index(_read_index(root))
    with root.entered(oci.BLOBS) as blobs:
        blobs.refuse_extra({oci.ALGORITHM})
        with blobs.entered(oci.ALGORITHM) as files:
            return _read_contents(files, index, whole=True)


def _read_contents(files: Directory, index: Index, *, whole: bool) -> Contents:
    """What the index lists; `whole`: the directory of blobs must hold nothing else."""
    descriptor, data, extras = _read_images(files, index)
    image = decode_image(data)
    if whole:
        parts = [*index.manifests, image.config, *image.layers]
        named = {part.digest for part in parts} | {part.digest for _, extra in extras for part in extra.parts}
        files.refuse_extra({digest.removeprefix(f"{oci.ALGORITHM}:") for digest in named})
    config, layers, held = _read_parts(files, image)
    attached = tuple(_read_attached(files, *extra) for extra in extras)
    records = [extra.layers[0].data for extra in attached if extra.artifact_type == oci.PROVENANCE]
    return Contents(descriptor, data, config, layers, held, records[0] if records else None, attached)


def _read_parts(files: Directory, image: Image) -> tuple[bytes, tuple[Layer, ...], dict[str, bytes]]:
    config = _read_blob(files, image.config, "manifest", limits.MAX_JSON_BYTES)
    layers, held = [], {}
    for part in image.layers:
        layer = Layer(part.media_type, _layer_name(part), part.digest, part.size)
        if part.media_type == oci.NATIVE:
            _check_blob(files, part, layer.name)
        else:
            held[part.digest] = _read_blob(files, part, layer.name, _LAYER_LIMITS[part.media_type])
        layers.append(layer)
    return config, tuple(layers), held


def read_layer(path: Path, layer: Layer) -> bytes:
    """The content of a layer of the bundle, or of the directory of many bundles' blobs, at `path`.

    Raises BundleError: it may have been changed or removed since the bundle was opened.
    """
    part = Descriptor(layer.media_type, layer.digest, layer.size)
    with opened(path) as root, root.entered(oci.BLOBS) as blobs, blobs.entered(oci.ALGORITHM) as files:
        try:
            return _read_blob(files, part, layer.name, _LAYER_LIMITS[layer.media_type])
        except BundleError as error:
            raise error.inside(str(path)) from None


def _read_attached(files: Directory, manifest: bytes, document: Document) -> Attached:
    blobs: dict[str, bytes] = {}
    for part in document.parts:
        is_record = part.media_type == oci.PROVENANCE
        what, limit = ("provenance", limits.MAX_JSON_BYTES) if is_record else ("attached", limits.MAX_ATTACHED_BYTES)
        wanted = Descriptor(part.media_type, part.digest, part.size)
        blobs[part.digest] = _read_blob(files, wanted, what, limit)
    return attachments.with_blobs(manifest, document, blobs)


def _check_marker(root: Directory) -> None:
    if not root.holds(oci.LAYOUT_FILE):
        message = f"expected a bundle, found a directory without {oci.LAYOUT_FILE}"
        raise BundleError("layout-missing", message, fix="name a bundle's directory, which `precast build` makes")
    data = root.read(oci.LAYOUT_FILE, limits.MAX_MARKER_BYTES)
    expected = decode_json(oci.MARKER, dict[str, str], oci.LAYOUT_FILE)
    if decode_foreign_json(data, dict[str, str], oci.LAYOUT_FILE, limits.MAX_MARKER_BYTES) != expected:
        raise BundleError("layout-marker", f"{oci.LAYOUT_FILE}: expected {oci.MARKER.decode()}")


def _read_index(root: Directory) -> bytes:
    return root.read(oci.INDEX_FILE, limits.MAX_INDEX_BYTES)


def decode_index(data: bytes) -> Index:
    """The list in the content of an `index.json`: a bundle, and what is attached to it.

    Raises BundleError: `json-*`, `index-invalid`, `media-type` or `limit-exceeded`.
    """
    index = decode_foreign_json(data, Index, oci.INDEX_FILE, limits.MAX_INDEX_BYTES)
    if index.schema_version != 2:
        raise BundleError("index-invalid", f"{oci.INDEX_FILE}: expected schemaVersion 2, found {index.schema_version}")
    _expect("media-type", oci.INDEX_FILE, index.media_type or oci.INDEX_TYPE, oci.INDEX_TYPE)
    if len(index.manifests) > 1 + limits.MAX_ATTACHED:  # before each of them is read
        raise _not_one(f"{len(index.manifests)} manifests")
    if len({part.digest for part in index.manifests}) != len(index.manifests):
        raise _not_one("a manifest that is listed twice")
    return index


def _not_one(found: str) -> BundleError:
    message = f"{oci.INDEX_FILE}: expected one bundle, at most one provenance record and {limits.MAX_ATTACHED}"
    return BundleError("index-invalid", f"{message} attached manifests in all, found {found}")


def _read_images(files: Directory, index: Index) -> tuple[Descriptor, bytes, list[tuple[bytes, Document]]]:
    """The bundle's image manifest, and those attached to it with their bytes."""
    manifests = [(descriptor, _read_manifest(files, descriptor)) for descriptor in index.manifests]
    documents = [(descriptor, data, attachments.decode(data)) for descriptor, data in manifests]
    own = [(descriptor, data) for descriptor, data, document in documents if document.subject is None]
    extras = [(data, document) for _, data, document in documents if document.subject is not None]
    records = [data for data, document in extras if document.type == oci.PROVENANCE]
    if len(own) != 1 or len(records) > 1:
        raise _not_one(f"{len(own)} and {len(records)}")
    ((descriptor, image),) = own
    _check_entry(descriptor, decode_image(image))
    for data, document in extras:
        check_attached(data, document, descriptor)
    attachments.check_together([document for _, document in extras])
    return Descriptor(oci.IMAGE_TYPE, descriptor.digest, descriptor.size), image, extras


def _read_manifest(files: Directory, descriptor: Descriptor) -> bytes:
    _expect("media-type", oci.INDEX_FILE, descriptor.media_type, oci.IMAGE_TYPE)
    return _read_blob(files, descriptor, "image manifest", limits.MAX_JSON_BYTES)


def _check_entry(descriptor: Descriptor, image: Image) -> None:
    # Of the tools that copy layouts some leave the type out of the index, and some write the config's there.
    if descriptor.artifact_type not in (None, image.config.media_type):
        _expect("artifact-type", oci.INDEX_FILE, descriptor.artifact_type, image.artifact_type)


def decode_strict(data: bytes) -> Image:
    """An image manifest of the one form that this format writes.

    Raises BundleError: `json-*`, `image-invalid` or `limit-exceeded`.
    """
    what = "image manifest"
    image = decode_json(data, Image, what)
    if image.schema_version != 2 or image.media_type != oci.IMAGE_TYPE or image.annotations:
        message = f"{what}: expected schemaVersion 2, mediaType {oci.IMAGE_TYPE} and no annotations"
        raise BundleError("image-invalid", message)
    return image


def decode_image(data: bytes) -> Image:
    """A bundle's image manifest: its layers, their order and names, and how large they may be.

    Raises BundleError: `json-*`, `image-invalid`, `artifact-type`, `media-type`, `name-invalid`, `digest-invalid`,
    `blob-size` or `limit-exceeded`.
    """
    image = decode_strict(data)
    _check_image(image)
    for part in (image.config, *image.layers):
        oci.blob_name(part, "blob")
        _check_size(part, "blob", _LAYER_LIMITS.get(part.media_type, limits.MAX_JSON_BYTES))
    held = [image.config, *(part for part in image.layers if part.media_type != oci.NATIVE)]
    if sum(part.size for part in held) > limits.MAX_HELD_BYTES:
        message = f"more than {limits.MAX_HELD_BYTES} bytes in all blobs but native layers together"
        raise BundleError("limit-exceeded", message)
    return image


def _check_image(image: Image) -> None:
    _expect("artifact-type", "image manifest", image.artifact_type, oci.BUNDLE)
    _expect("media-type", "manifest", image.config.media_type, oci.MANIFEST)
    if len(image.layers) > limits.MAX_LAYERS:
        raise BundleError("limit-exceeded", f"{len(image.layers)} layers; at most {limits.MAX_LAYERS} are allowed")
    found = [part.media_type for part in image.layers]
    num_native = found.count(oci.NATIVE)
    if num_native > limits.MAX_NATIVE_LAYERS:
        message = f"{num_native} native layers; at most {limits.MAX_NATIVE_LAYERS} are allowed"
        raise BundleError("limit-exceeded", message)
    num_files = len(found) - 2 - num_native
    if found != [oci.GRAPH, oci.CONSTANTS, *[oci.TOKENIZER] * num_files, *[oci.NATIVE] * num_native]:
        message = f"layers: expected {oci.GRAPH}, {oci.CONSTANTS} and any number of {oci.TOKENIZER} and {oci.NATIVE}"
        raise BundleError("media-type", f"{message}, found {', '.join(found[:4])[:400] or 'none'}")
    titled = list(map(_layer_name, image.layers[2:]))
    for what, names in (("tokenizer files", titled[:num_files]), ("native layers", titled[num_files:])):
        if names != sorted(set(names)):
            raise BundleError("image-invalid", f"layers: expected {what} in the order of their names, each once")
    if any(part.artifact_type or part.annotations for part in (image.config, *image.layers[:2])):
        message = "image manifest: expected annotations on tokenizer files and native layers only"
        raise BundleError("image-invalid", message)


def check_attached(data: bytes, document: Document, bundle: Descriptor) -> None:
    """Raise BundleError unless the manifest, whose bytes are `data`, can be attached to this bundle in a layout."""
    attachments.check(document, bundle)
    if document.type == oci.PROVENANCE:
        _check_provenance(decode_strict(data))


def _check_provenance(image: Image) -> None:
    """Raise BundleError (`artifact-type`, `image-invalid`) unless it has the form of a provenance record's manifest."""
    _expect("artifact-type", "attached manifest", image.artifact_type, oci.PROVENANCE)
    if image.config != oci.describe(oci.EMPTY, oci.EMPTY_TYPE):
        raise BundleError("image-invalid", f"attached manifest: expected an empty config of type {oci.EMPTY_TYPE}")
    (record, *more) = image.layers or (None,)
    if record is None or more or record != Descriptor(oci.PROVENANCE, record.digest, record.size):
        raise BundleError("image-invalid", f"attached manifest: expected one layer of type {oci.PROVENANCE}")


def _expect(code: str, what: str, found: str, expected: str) -> None:
    if found != expected:
        raise BundleError(code, f"{what}: expected {shown(expected)}, found {shown(repr(found))}")


def _layer_name(part: Descriptor) -> str:
    """What a layer goes by: the title of a tokenizer file or native layer, or its role."""
    if part.media_type not in oci.TITLED:
        return "graph" if part.media_type == oci.GRAPH else "constants"
    if set(part.annotations) != {oci.TITLE} or part.artifact_type:
        raise BundleError("image-invalid", f"layer of type {part.media_type}: expected one annotation, {oci.TITLE}")
    check_file_name(part.annotations[oci.TITLE])
    return part.annotations[oci.TITLE]


def _type_of(files: Directory, descriptor: Descriptor) -> str:
    """The artifact type that the index gives, or the manifest: some tools that copy layouts leave it out."""
    if descriptor.artifact_type == oci.MANIFEST:  # others write the config's type there
        return oci.BUNDLE
    return descriptor.artifact_type or attachments.decode(_read_manifest(files, descriptor)).type


def _subject_of(files: Directory, descriptor: Descriptor) -> str | None:
    return attachments.decode(_read_manifest(files, descriptor)).subject_digest()


# --- blobs -----------------------------------------------------------------------------------------------------


def _read_blob(files: Directory, descriptor: Descriptor, what: str, limit: int) -> bytes:
    """A blob's content, of the size and digest that its descriptor says; `what` names it in messages."""
    name = oci.blob_name(descriptor, what)
    _check_size(descriptor, what, limit)
    with _about(what):
        data = files.read_exactly(name, descriptor.size)
    _check_digest(descriptor, what, oci.digest_of(data))
    return data


def _check_blob(files: Directory, descriptor: Descriptor, what: str) -> None:
    """Hold a blob against its size and digest, in little memory."""
    name = oci.blob_name(descriptor, what)
    with _about(what):
        found = files.hash_exactly(name, descriptor.size)
    _check_digest(descriptor, what, f"{oci.ALGORITHM}:{found}")


@contextlib.contextmanager
def _about(what: str) -> Iterator[None]:
    """Errors of the directory of blobs, as those of what is read there."""
    try:
        yield
    except BundleError as error:
        error.message = f"{what}: {error.message}"
        raise error.inside(f"{oci.BLOBS}/{oci.ALGORITHM}") from None


def _check_size(descriptor: Descriptor, what: str, limit: int) -> None:
    if descriptor.size > limit:
        message = f"{what}: {descriptor.size} bytes; at most {limit} are allowed"
        raise BundleError("limit-exceeded", message, where=_where(descriptor))


def _check_digest(descriptor: Descriptor, what: str, found: str) -> None:
    if found != descriptor.digest:
        message, fix = f"{what}: expected {descriptor.digest}, found {found}", "copy or build the bundle again"
        raise BundleError("blob-digest", message, where=_where(descriptor), fix=f"the file is damaged: {fix}")


def _where(descriptor: Descriptor) -> str:
    return oci.blob_path(descriptor.digest)
