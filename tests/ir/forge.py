"""Bundles that are wrong in exactly one way: taken apart, changed, and put together with digests that fit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from examples import TINY_FILES, tiny_constants, tiny_graph, tiny_manifest
from precast.ir import encoding
from precast.ir.bundle import oci
from precast.ir.weights import tensorfile

Edit = Callable[[Any], Any]


def canonical(value: Any) -> bytes:
    """Canonical JSON, written with the standard library."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def digest(data: bytes) -> str:
    """The digest of a blob, written with the standard library."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def described(data: bytes, media_type: str, **more: Any) -> dict[str, Any]:
    """A descriptor as plain data."""
    return {"digest": digest(data), "mediaType": media_type, "size": len(data), **more}


def compressed(raw: bytes, **options: Any) -> bytes:
    """A zstd frame of the form that graphs have, but for `options`."""
    return zstandard.ZstdCompressor(level=3, **options).compress(raw)


@cache
def _raw_tiny_graph() -> bytes:
    return zstandard.ZstdDecompressor().decompress(encoding.encode_graph(tiny_graph()))


class Forgery:
    """The tiny bundle in parts. Edits run where the part is made, so that everything made from it fits the edit.

    `raw_graph`, `graph`, `constants` and `files` are contents. An edit of `manifest`, `image`, `attached` or `index`
    gets the document as plain data and changes it; an edit of `graph_bytes`, `manifest_bytes`, `image_bytes`,
    `attached_bytes`, `index_bytes` or `marker` gets its bytes and returns others; an edit of `place` gets the path of
    the written bundle.
    """

    def __init__(self) -> None:
        self.raw_graph = _raw_tiny_graph()
        self.graph: bytes | None = None
        self.constants = tensorfile.encode(tiny_constants())
        self.files: list[tuple[str, bytes]] = sorted(TINY_FILES.items())
        self.provenance = b'{"host":"example"}'
        self.edits: dict[str, list[Edit]] = {}

    def edit(self, part: str, change: Edit) -> None:
        """Have `change` applied to the part when it is made."""
        self.edits.setdefault(part, []).append(change)

    def edit_graph(self, change: Edit) -> None:
        """Change the graph as plain data; it is encoded canonically again."""
        plain = msgspec.msgpack.decode(self.raw_graph)
        change(plain)
        self.raw_graph = msgspec.msgpack.encode(plain, order="sorted")

    def write(self, path: Path) -> None:
        """Write the bundle."""
        graph = compressed(self.raw_graph) if self.graph is None else self.graph
        graph = self._bytes("graph_bytes", graph)
        layers = [("graph", "graph", oci.GRAPH, graph), ("constants", "constants", oci.CONSTANTS, self.constants)]
        layers += [("tokenizer", name, oci.TOKENIZER, data) for name, data in self.files]
        config = self._manifest(layers)
        image = self._image(config, layers)
        attached = self._attached(image)
        index = self._index(image, attached)
        blobs = path / "blobs" / "sha256"
        blobs.mkdir(parents=True)
        for data in (config, image, attached, b"{}", self.provenance, *(layer[3] for layer in layers)):
            (blobs / digest(data).removeprefix("sha256:")).write_bytes(data)
        (path / "index.json").write_bytes(index)
        (path / "oci-layout").write_bytes(self._bytes("marker", oci.MARKER))
        self._document("place", path)

    def _manifest(self, layers: list[tuple[str, str, str, bytes]]) -> bytes:
        manifest = msgspec.to_builtins(tiny_manifest())
        manifest["blobs"] = [
            {"digest": digest(data), "name": name, "role": role, "size": len(data)} for role, name, _, data in layers
        ]
        return self._bytes("manifest_bytes", canonical(self._document("manifest", manifest)))

    def _image(self, config: bytes, layers: list[tuple[str, str, str, bytes]]) -> bytes:
        image = {
            "artifactType": oci.BUNDLE,
            "config": described(config, oci.MANIFEST),
            "layers": [
                described(data, kind, **({"annotations": {oci.TITLE: name}} if role == "tokenizer" else {}))
                for role, name, kind, data in layers
            ],
            "mediaType": oci.IMAGE_TYPE,
            "schemaVersion": 2,
        }
        return self._bytes("image_bytes", canonical(self._document("image", image)))

    def _attached(self, image: bytes) -> bytes:
        attached = {
            "artifactType": oci.PROVENANCE,
            "config": described(b"{}", oci.EMPTY_TYPE),
            "layers": [described(self.provenance, oci.PROVENANCE)],
            "mediaType": oci.IMAGE_TYPE,
            "schemaVersion": 2,
            "subject": described(image, oci.IMAGE_TYPE),
        }
        return self._bytes("attached_bytes", canonical(self._document("attached", attached)))

    def _index(self, image: bytes, attached: bytes) -> bytes:
        index = {
            "manifests": [
                described(image, oci.IMAGE_TYPE, artifactType=oci.BUNDLE, annotations={oci.REF_NAME: "latest"}),
                described(attached, oci.IMAGE_TYPE, artifactType=oci.PROVENANCE),
            ],
            "mediaType": oci.INDEX_TYPE,
            "schemaVersion": 2,
        }
        return self._bytes("index_bytes", canonical(self._document("index", index)))

    def _document(self, part: str, value: Any) -> Any:
        for change in self.edits.get(part, ()):
            change(value)
        return value

    def _bytes(self, part: str, data: bytes) -> bytes:
        for change in self.edits.get(part, ()):
            data = change(data)
        return data


def blob_of(path: Path, what: str) -> Path:
    """The file of a blob: `manifest`, `graph`, `constants` or a tokenizer file's name."""
    index = json.loads((path / "index.json").read_bytes())
    image = json.loads(_file(path, index["manifests"][0]).read_bytes())
    named = {"image": index["manifests"][0], "manifest": image["config"]}
    named |= {"graph": image["layers"][0], "constants": image["layers"][1]}
    named |= {layer["annotations"][oci.TITLE]: layer for layer in image["layers"][2:]}
    return _file(path, named[what])


def _file(path: Path, descriptor: dict[str, Any]) -> Path:
    return path / "blobs" / "sha256" / descriptor["digest"].removeprefix("sha256:")
