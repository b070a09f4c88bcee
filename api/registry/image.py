"""A bundle as a container image with one layer, for runtimes that mount images and no other artifacts.

The layer is a tar of the layout: mounted at a path, the path is the bundle. It is the same for every architecture, so
an index names it for each. Nothing of it depends on a clock, a user or the order of a directory.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from precast.ir.bundle import oci
from precast.ir.bundle.codec import encode_json
from precast.ir.bundle.layout import Survey, compose_index
from precast.registry.transport import BLOCK_BYTES

LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
ARCHITECTURES = ("amd64", "arm64")
BUNDLE_DIGEST = "dev.precast.bundle.digest"
"""The annotation by which an image says whose bundle it holds."""
_RECORD = tarfile.RECORDSIZE


class Image(NamedTuple):
    """The image's blobs as (digest, size, how it is opened), its manifests, and `top`, the index that names these."""

    blobs: list[tuple[str, int, Callable[[], BinaryIO]]]
    manifests: list[bytes]
    top: bytes


def image_of(path: Path, found: Survey) -> Image:
    """The image of the bundle at `path`. Its layer is read once here, for its digest, and once when it is sent."""
    entries = _entries(path, found)
    digest, size = hashlib.sha256(), 0
    for piece in _tar(entries):
        digest.update(piece)
        size += len(piece)
    layer = oci.Descriptor(LAYER_TYPE, f"{oci.ALGORITHM}:{digest.hexdigest()}", size)
    blobs: list[tuple[str, int, Callable[[], BinaryIO]]] = [
        (layer.digest, size, lambda: cast(BinaryIO, _Pieces(_tar(entries))))
    ]
    manifests, listed = [], []
    annotations = {BUNDLE_DIGEST: found.descriptor.digest}
    for architecture in ARCHITECTURES:
        rootfs = {"type": "layers", "diff_ids": [layer.digest]}
        config = encode_json({"architecture": architecture, "os": "linux", "config": {}, "rootfs": rootfs})
        blobs.append((oci.digest_of(config), len(config), lambda config=config: io.BytesIO(config)))  # type: ignore[misc]
        described = oci.describe(config, CONFIG_TYPE)
        manifest = encode_json(
            {
                "schemaVersion": 2, "mediaType": oci.IMAGE_TYPE, "config": described, "layers": [layer],
                "annotations": annotations,
            }
        )  # fmt: skip
        manifests.append(manifest)
        entry = {"mediaType": oci.IMAGE_TYPE, "digest": oci.digest_of(manifest), "size": len(manifest)}
        listed.append({**entry, "platform": {"architecture": architecture, "os": "linux"}})
    index = {"schemaVersion": 2, "mediaType": oci.INDEX_TYPE, "manifests": listed, "annotations": annotations}
    return Image(blobs, manifests, encode_json(index))


def _entries(path: Path, found: Survey) -> list[tuple[str, int, bytes | Path | None]]:
    """The layout's entries by name: size, and content, its file, or None for a directory."""
    index = compose_index(found.descriptor, found.attached)
    entries: dict[str, tuple[int, bytes | Path | None]] = {
        f"{oci.BLOBS}/": (0, None),
        f"{oci.BLOBS}/{oci.ALGORITHM}/": (0, None),
        oci.INDEX_FILE: (len(index), index),
        oci.LAYOUT_FILE: (len(oci.MARKER), oci.MARKER),
        oci.blob_path(found.descriptor.digest): (len(found.image), found.image),
    }
    for part in found.parts:
        entries[oci.blob_path(part.digest)] = (part.size, path / oci.blob_path(part.digest))
    for extra in found.attached:
        entries |= {oci.blob_path(digest): (len(data), data) for digest, data in extra.blobs().items()}
    return [(name, *entries[name]) for name in sorted(entries)]


def _tar(entries: list[tuple[str, int, bytes | Path | None]]) -> Iterator[bytes]:
    """The tar of the entries, piece by piece."""
    length = 0
    for name, size, content in entries:
        info = tarfile.TarInfo(name.removesuffix("/"))
        info.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
        info.size, info.mode = size, 0o755 if content is None else 0o644
        head = info.tobuf(tarfile.USTAR_FORMAT)
        yield head
        yield from _content(content)
        padding = -size % tarfile.BLOCKSIZE
        yield bytes(padding)
        length += len(head) + size + padding
    end = 2 * tarfile.BLOCKSIZE
    yield bytes(end + -(length + end) % _RECORD)


def _content(content: bytes | Path | None) -> Iterator[bytes]:
    if isinstance(content, bytes):
        yield content
    elif content is not None:
        with content.open("rb") as file:
            while data := file.read(BLOCK_BYTES):
                yield data


class _Pieces(io.RawIOBase):
    """Pieces of bytes as a file to read from."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._left = b""

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes; none at the end alone."""
        while not self._left:
            piece = next(self._pieces, None)
            if piece is None:
                return b""
            self._left = piece
        data, self._left = (self._left, b"") if size < 0 else (self._left[:size], self._left[size:])
        return data
