"""Every way to be wrong has one error: a table of bundles that are wrong in one way each, and the code that says so."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from forge import Forgery, blob_of, compressed, described, digest

from examples import write_tiny
from precast.ir import limits
from precast.ir.artifact import Bundle
from precast.ir.bundle import oci
from precast.ir.encoding import FORMAT
from precast.ir.errors import CODES, FIXES, BundleError
from precast.ir.weights import tensorfile

NEXT = FORMAT[1] + 1

Forge = Callable[[Forgery], object]


def opened(forge: Forge, tmp_path: Path) -> Bundle:
    """The forged bundle, opened."""
    forgery = Forgery()
    forge(forgery)
    forgery.write(tmp_path / "x.bundle")
    return Bundle.open(tmp_path / "x.bundle")


def refusal(forge: Forge, tmp_path: Path) -> BundleError:
    """The error that the forged bundle gives."""
    with pytest.raises(BundleError) as caught:
        opened(forge, tmp_path)
    assert str(tmp_path / "x.bundle") in str(caught.value)
    return caught.value


def at(*keys: Any, value: Any = None, **changes: Any) -> Callable[[Any], None]:
    """An edit of plain data: set what `keys` lead to, or update it with `changes`."""

    def change(document: Any) -> None:
        for key in keys[:-1]:
            document = document[key]
        if changes:
            document[keys[-1]].update(changes)
        else:
            document[keys[-1]] = value

    return change


def swap(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    """An edit of bytes: exactly one `old` becomes `new`."""

    def change(data: bytes) -> bytes:
        assert data.count(old) == 1, (old, data)
        return data.replace(old, new)

    return change


def test_unchanged_forgery_opens(tmp_path: Path) -> None:
    written = write_tiny(tmp_path / "written.bundle")

    bundle = opened(lambda forgery: None, tmp_path)

    assert bundle.graph == written.graph
    assert bundle.constants == written.constants
    assert bundle.files("tokenizer") == written.files("tokenizer")
    assert bundle.provenance == {"host": "example"}


def test_layout_that_another_tool_wrote_opens(tmp_path: Path) -> None:
    # What `skopeo copy oci:a:latest oci:b:latest` leaves: no provenance, white space, another order, fewer fields.
    def forge(forgery: Forgery) -> None:
        forgery.edit("marker", lambda data: b'{"imageLayoutVersion": "1.0.0"}')
        forgery.edit("index_bytes", _as_skopeo_writes)
        forgery.edit("place", _without_provenance)

    assert opened(forge, tmp_path).provenance == {}


def _as_skopeo_writes(data: bytes) -> bytes:
    first = json.loads(data)["manifests"][0]
    kept = {key: first[key] for key in ("mediaType", "digest", "size", "annotations")}
    return json.dumps({"schemaVersion": 2, "manifests": [kept]}, indent=1).encode()


def _without_provenance(path: Path) -> None:
    image = json.loads(blob_of_first(path).read_bytes())
    kept = {part["digest"] for part in (image["config"], *image["layers"])} | {digest(blob_of_first(path).read_bytes())}
    for file in (path / "blobs" / "sha256").iterdir():
        if f"sha256:{file.name}" not in kept:
            file.unlink()


def blob_of_first(path: Path) -> Path:
    """The file of the image manifest."""
    return blob_of(path, "image")


# --- files -----------------------------------------------------------------------------------------------------


def remove(name: str) -> Callable[[Path], None]:
    """Remove a file or a whole directory."""

    def change(path: Path) -> None:
        target = path / name
        target.rename(path.with_name("aside"))

    return change


def add(name: str) -> Callable[[Path], object]:
    """Add an empty file."""
    return lambda path: (path / name).write_bytes(b"")


def link(name: str) -> Callable[[Path], None]:
    """Put a symbolic link in place of a file or directory, to the same content outside of the bundle."""

    def change(path: Path) -> None:
        aside = path.with_name("aside")
        (path / name).rename(aside)
        (path / name).symlink_to(aside)

    return change


def link_graph(path: Path) -> None:
    link(str(blob_of(path, "graph").relative_to(path)))(path)


def pipe_graph(path: Path) -> None:
    blob = blob_of(path, "graph")
    blob.unlink()
    os.mkfifo(blob)


def directory_for_graph(path: Path) -> None:
    blob = blob_of(path, "graph")
    blob.unlink()
    blob.mkdir()


def file_for_blobs(path: Path) -> None:
    remove("blobs/sha256")(path)
    (path / "blobs" / "sha256").write_bytes(b"")


PLACE: list[tuple[str, Callable[[Path], object], str, str]] = [
    ("no oci-layout", remove("oci-layout"), "layout-missing", "oci-layout"),
    ("no index.json", remove("index.json"), "layout-missing", "index.json"),
    ("no blobs", remove("blobs"), "layout-missing", "blobs"),
    ("no blobs/sha256", remove("blobs/sha256"), "layout-missing", "sha256"),
    ("extra file", add("notes.txt"), "layout-extra", "notes.txt"),
    ("extra hidden file", add(".hidden"), "layout-extra", ".hidden"),
    ("extra file in blobs", add("blobs/x"), "layout-extra", "'x'"),
    ("extra blob", add("blobs/sha256/" + 64 * "0"), "layout-extra", "000"),
    ("another hash's folder", lambda path: (path / "blobs" / "sha512").mkdir(), "layout-extra", "sha512"),
    ("link for oci-layout", link("oci-layout"), "layout-kind", "oci-layout"),
    ("link for index.json", link("index.json"), "layout-kind", "index.json"),
    ("link for blobs", link("blobs"), "layout-kind", "blobs"),
    ("link for blobs/sha256", link("blobs/sha256"), "layout-kind", "sha256"),
    ("link for a blob", link_graph, "layout-kind", "graph"),
    ("pipe for a blob", pipe_graph, "layout-kind", "graph"),
    ("directory for a blob", directory_for_graph, "layout-kind", "graph"),
    ("file for a directory", file_for_blobs, "layout-kind", "sha256"),
    ("graph missing", lambda path: blob_of(path, "graph").unlink(), "blob-missing", "graph"),
    ("manifest missing", lambda path: blob_of(path, "manifest").unlink(), "blob-missing", "manifest"),
]


@pytest.mark.parametrize(("change", "code", "names"), [row[1:] for row in PLACE], ids=[row[0] for row in PLACE])
def test_files(change: Callable[[Path], object], code: str, names: str, tmp_path: Path) -> None:
    error = refusal(lambda forgery: forgery.edit("place", change), tmp_path)

    assert error.code == code
    assert names in str(error)
    assert error.fix is not None


def test_directory_that_is_no_bundle(tmp_path: Path) -> None:
    """Its files are somebody's: nothing advises to remove them."""
    (tmp_path / "model.safetensors").write_bytes(b"precious")

    with pytest.raises(BundleError, match="expected a bundle, found a directory without oci-layout") as caught:
        Bundle.open(tmp_path)

    assert caught.value.code == "layout-missing"
    assert caught.value.where == str(tmp_path)
    assert caught.value.fix == "name a bundle's directory, which `precast build` makes"


def test_what_is_no_part_of_a_bundle_is_to_be_moved(tmp_path: Path) -> None:
    error = refusal(lambda forgery: forgery.edit("place", add("notes.txt")), tmp_path)

    assert error.fix == "move it elsewhere, or copy the bundle again"


def test_errors_without_advice_of_their_own_give_that_of_their_code() -> None:
    assert FIXES.keys() <= CODES.keys()
    assert BundleError("blob-missing", "gone").fix == FIXES["blob-missing"]
    assert BundleError("blob-missing", "gone", fix="look behind the sofa").fix == "look behind the sofa"
    assert BundleError("graph-encoding", "odd").fix is None


def test_nothing_at_the_path(tmp_path: Path) -> None:
    with pytest.raises(BundleError) as caught:
        Bundle.open(tmp_path / "none")
    assert caught.value.code == "bundle-missing"


def test_path_with_a_null_byte(tmp_path: Path) -> None:
    with pytest.raises(BundleError) as caught:
        Bundle.open(f"{tmp_path}/a\0b")
    assert caught.value.code == "bundle-missing"


def test_file_at_the_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BundleError) as caught:
        Bundle.open(tmp_path / "file")
    assert caught.value.code == "bundle-not-a-directory"


@pytest.mark.parametrize("path", [None, 3, b"bundle"])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(BundleError, match="expected a bundle's path, found a") as caught:
        Bundle.open(path)

    assert caught.value.code == "bundle-missing"


def test_link_to_a_bundle_opens(tmp_path: Path) -> None:
    bundle = write_tiny(tmp_path / "x.bundle")
    (tmp_path / "link").symlink_to("x.bundle")

    assert Bundle.open(tmp_path / "link").digest == bundle.digest


@pytest.mark.parametrize("what", ["image", "manifest", "graph", "constants", "tokenizer.json"])
def test_flipped_bit(what: str, tmp_path: Path) -> None:
    def flip(path: Path) -> None:
        data = bytearray(blob_of(path, what).read_bytes())
        data[len(data) // 2] ^= 1
        target = blob_of(path, what)
        target.write_bytes(data)

    error = refusal(lambda forgery: forgery.edit("place", flip), tmp_path)

    assert error.code == "blob-digest"
    assert ("image manifest" if what == "image" else what) in str(error)


@pytest.mark.parametrize("what", ["image", "manifest", "graph", "constants", "tokenizer.json"])
@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: b"", lambda data: data + b"\0"])
def test_size_is_checked_before_the_digest(what: str, change: Callable[[bytes], bytes], tmp_path: Path) -> None:
    def resize(path: Path) -> None:
        target = blob_of(path, what)
        target.write_bytes(change(target.read_bytes()))

    error = refusal(lambda forgery: forgery.edit("place", resize), tmp_path)

    assert error.code == "blob-size"
    assert "expected" in error.message
    assert "bytes" in error.message


# --- documents -------------------------------------------------------------------------------------------------


def other_layer(media_type: str) -> dict[str, Any]:
    return described(b"x", media_type)


def reversed_keys(data: bytes) -> bytes:
    """The object with its keys in descending order."""
    return json.dumps(dict(reversed(json.loads(data).items())), separators=(",", ":")).encode()


DOCUMENTS: list[tuple[str, str, Callable[[Any], Any], str]] = [
    # oci-layout
    ("marker of version 2", "marker", lambda _: b'{"imageLayoutVersion":"2.0.0"}', "layout-marker"),
    ("marker with more", "marker", lambda _: b'{"a":"b","imageLayoutVersion":"1.0.0"}', "layout-marker"),
    ("marker that is no object", "marker", lambda _: b"[]", "json-invalid"),
    ("marker with a key twice", "marker", lambda _: b'{"imageLayoutVersion":"9","imageLayoutVersion":"1.0.0"}',
     "json-duplicate-key"),
    ("marker too large", "marker", lambda data: data + b" " * limits.MAX_MARKER_BYTES, "limit-exceeded"),
    # index.json
    ("index empty", "index_bytes", lambda _: b"", "json-invalid"),
    ("index cut", "index_bytes", lambda data: data[:-1], "json-invalid"),
    ("index not UTF-8", "index_bytes", swap(b"latest", b"late\xff\xff"), "json-invalid"),
    ("index followed by more", "index_bytes", lambda data: data + b"{}", "json-invalid"),
    ("index with an unknown field", "index", at("urls", value=[]), "json-invalid"),
    ("index with an unknown descriptor field", "index", at("manifests", 0, data="e30="), "json-invalid"),
    ("index with a key twice", "index_bytes", swap(b'"schemaVersion":2', b'"schemaVersion":1,"schemaVersion":2'),
     "json-duplicate-key"),
    ("index with a nested key twice", "index_bytes",
     swap(b'"org.opencontainers.image.ref.name":"latest"',
          b'"org.opencontainers.image.ref.name":"a","org.opencontainers.image.ref.name":"latest"'),
     "json-duplicate-key"),
    ("index nested deep", "index_bytes", lambda _: b"[" * 60_000, "json-invalid"),
    ("index too large", "index_bytes", lambda data: data + b" " * limits.MAX_INDEX_BYTES, "limit-exceeded"),
    ("index of schema 1", "index", at("schemaVersion", value=1), "index-invalid"),
    ("index of another media type", "index", at("mediaType", value=oci.IMAGE_TYPE), "media-type"),
    ("index without manifests", "index", at("manifests", value=[]), "index-invalid"),
    ("two bundles", "index", lambda index: index["manifests"].append(index["manifests"][0]), "index-invalid"),
    ("two records", "index", lambda index: index["manifests"].append(index["manifests"][1]), "index-invalid"),
    ("record only", "index", lambda index: index["manifests"].pop(0), "index-invalid"),
    ("manifest of another media type", "index",
     at("manifests", 0, mediaType="application/vnd.docker.distribution.manifest.v2+json"), "media-type"),
    ("manifest of another artifact type", "index", at("manifests", 0, artifactType=oci.PROVENANCE), "artifact-type"),
    ("digest with a path", "index", at("manifests", 0, digest="sha256:../../../../etc/passwd"), "digest-invalid"),
    ("digest with an absolute path", "index", at("manifests", 0, digest="/etc/passwd"), "digest-invalid"),
    ("digest with a path of 64 characters", "index",
     at("manifests", 0, digest="sha256:" + "../" * 21 + "x"), "digest-invalid"),
    ("digest in upper case", "index", at("manifests", 0, digest="sha256:" + "A" * 64), "digest-invalid"),
    ("digest too short", "index", at("manifests", 0, digest="sha256:" + "a" * 63), "digest-invalid"),
    ("digest with a line end", "index", at("manifests", 0, digest="sha256:" + "a" * 64 + "\n"), "digest-invalid"),
    ("digest of another hash", "index", at("manifests", 0, digest="sha512:" + "a" * 128), "digest-invalid"),
    ("digest empty", "index", at("manifests", 0, digest=""), "digest-invalid"),
    ("digest of nothing", "index", at("manifests", 0, digest="sha256:" + "0" * 64), "blob-missing"),
    ("size negative", "index", at("manifests", 0, size=-1), "blob-size"),
    ("size wrong", "index", at("manifests", 0, size=1), "blob-size"),
    ("manifests that are counted before they are read", "index",
     lambda index: index["manifests"].extend([described(b"missing", oci.IMAGE_TYPE)] * 300), "index-invalid"),
    ("size above the limit", "index", at("manifests", 0, size=limits.MAX_JSON_BYTES + 1), "limit-exceeded"),
    ("size beyond 63 bits", "index", at("manifests", 0, size=2**63), "json-invalid"),
    ("size of 5000 digits", "index_bytes", swap(b'"schemaVersion":2', b'"schemaVersion":' + b"9" * 5000),
     "json-invalid"),
    ("size as a float", "index", at("manifests", 0, size=1.5), "json-invalid"),
    # the image manifest
    ("image with white space", "image_bytes", lambda data: data + b"\n", "json-not-canonical"),
    ("image with a key twice", "image_bytes", swap(b'"schemaVersion":2', b'"schemaVersion":2,"schemaVersion":2'),
     "json-duplicate-key"),
    ("image with an unknown field", "image", at("history", value=[]), "json-invalid"),
    ("image of schema 1", "image", at("schemaVersion", value=1), "image-invalid"),
    ("image of another media type", "image", at("mediaType", value=oci.INDEX_TYPE), "image-invalid"),
    ("image with annotations", "image", at("annotations", value={"created": "now"}), "image-invalid"),
    ("image with a default written out", "image", at("annotations", value={}), "json-not-canonical"),
    ("another artifact", "image", at("artifactType", value="application/vnd.example.v1"), "artifact-type"),
    ("config of another media type", "image",
     at("config", mediaType="application/vnd.oci.image.config.v1+json"), "media-type"),
    ("config digest with a path", "image", at("config", digest="sha256:.."), "digest-invalid"),
    ("config too large", "image", at("config", size=limits.MAX_JSON_BYTES + 1), "limit-exceeded"),
    ("config with annotations", "image", at("config", annotations={"a": "b"}), "image-invalid"),
    ("no layers", "image", at("layers", value=[]), "media-type"),
    ("no constants", "image", lambda image: image["layers"].pop(1), "media-type"),
    ("two graphs", "image", lambda image: image["layers"].insert(0, image["layers"][0]), "media-type"),
    ("layers in another order", "image", lambda image: image["layers"].reverse(), "media-type"),
    ("layer of an unknown type", "image",
     lambda image: image["layers"].append(other_layer("application/vnd.precast.kernels.v1")), "media-type"),
    ("layer digest with a path", "image", at("layers", 0, digest="sha256:../oci-layout"), "digest-invalid"),
    ("layer too large", "image", at("layers", 0, size=limits.MAX_GRAPH_BYTES + 1), "limit-exceeded"),
    ("layer of the wrong size", "image", at("layers", 0, size=3), "blob-size"),
    ("graph with annotations", "image", at("layers", 0, annotations={"a": "b"}), "image-invalid"),
    ("all layers together too large", "image",
     lambda image: image["layers"].extend(
         described(b"x", oci.TOKENIZER, annotations={oci.TITLE: f"z{i}"}) | {"size": limits.MAX_TOKENIZER_BYTES}
         for i in range(9)), "limit-exceeded"),
    ("too many layers", "image",
     lambda image: image["layers"].extend(
         described(b"x", oci.TOKENIZER, annotations={oci.TITLE: f"z{i:04}"}) for i in range(limits.MAX_LAYERS)),
     "limit-exceeded"),
    ("tokenizer without a name", "image", at("layers", 2, annotations={"a": "b"}), "image-invalid"),
    ("tokenizer with more annotations", "image", at("layers", 2, "annotations", a="b"), "image-invalid"),
    ("tokenizer files out of order", "image",
     lambda image: image["layers"].append(image["layers"].pop(2)), "image-invalid"),
    ("tokenizer file twice", "image", lambda image: image["layers"].append(image["layers"][3]), "image-invalid"),
    # the provenance record
    ("record of another bundle", "attached", at("subject", digest="sha256:" + "0" * 64), "index-invalid"),
    ("record of an unknown type", "attached", at("artifactType", value=oci.BUNDLE), "artifact-type"),
    ("record with a config", "attached", at("config", mediaType=oci.MANIFEST), "image-invalid"),
    ("record without a layer", "attached", at("layers", value=[]), "image-invalid"),
    ("record with two layers", "attached",
     lambda image: image["layers"].append(image["layers"][0]), "image-invalid"),
    ("record layer of another type", "attached", at("layers", 0, mediaType=oci.MANIFEST), "image-invalid"),
    # the manifest
    ("newer major version", "manifest", at("format", value=[2, 0]), "format-newer"),
    ("newer minor version", "manifest", at("format", value=[1, NEXT]), "format-newer"),
    ("newer version with new fields", "manifest", lambda m: m.update(format=[1, NEXT], kernels={}), "format-newer"),
    ("older major version", "manifest", at("format", value=[0, 9]), "format-unknown"),
    ("negative version", "manifest", at("format", value=[1, -1]), "format-unknown"),
    ("no version", "manifest", lambda manifest: manifest.pop("format"), "json-invalid"),
    ("version of three numbers", "manifest", at("format", value=[1, 0, 0]), "json-invalid"),
    ("unknown field", "manifest", at("extra", value=1), "json-invalid"),
    ("unknown nested field", "manifest", at("model", rank=1), "json-invalid"),
    ("missing field", "manifest", lambda manifest: manifest.pop("ops"), "json-invalid"),
    ("unknown dtype", "manifest", at("model", dtype="float4"), "json-invalid"),
    ("unknown role", "manifest", at("blobs", 0, role="kernels"), "json-invalid"),
    ("integer beyond 63 bits", "manifest", at("model", num_parameters=2**63), "json-invalid"),
    ("key twice", "manifest_bytes", swap(b'"format":[1,1]', b'"format":[1,1],"format":[1,1]'), "json-duplicate-key"),
    ("white space", "manifest_bytes", swap(b'"format":[1,1]', b'"format":[1, 1]'), "json-not-canonical"),
    ("line end", "manifest_bytes", lambda data: data + b"\n", "json-not-canonical"),
    ("another escape", "manifest_bytes", swap(b'"name":"fuse_qkv"', b'"name":"fuse\\u005fqkv"'), "json-not-canonical"),
    ("keys out of order", "manifest_bytes", reversed_keys, "json-not-canonical"),
    ("default written out", "manifest", at("model", bos_token_id=None), "json-not-canonical"),
    ("nesting bomb", "manifest_bytes", lambda _: b'{"a":' * 100_000, "json-invalid"),
    ("nesting bomb in an unknown field", "manifest_bytes",
     lambda data: b'{"a":' + b"[" * 400_000 + b"]" * 400_000 + b"," + data[1:], "json-invalid"),
    ("too large", "manifest_bytes", lambda data: data + b" " * limits.MAX_JSON_BYTES, "limit-exceeded"),
    ("other blobs", "manifest", at("blobs", 0, size=1), "blob-list"),
    ("a blob less", "manifest", lambda manifest: manifest["blobs"].pop(), "blob-list"),
    ("blobs out of order", "manifest", lambda manifest: manifest["blobs"].reverse(), "blob-list"),
    ("unknown op", "manifest", at("ops", **{"aten.bernoulli.default": 1}), "op-unknown"),
    ("unknown version of an op", "manifest", at("ops", **{"precast.rotary": 7}), "op-unknown"),
    ("an op that the graph lacks", "manifest", at("ops", **{"precast.layer_norm": 1}), "manifest-invalid"),
    ("an op less", "manifest", lambda manifest: manifest["ops"].pop("precast.rotary"), "manifest-invalid"),
    ("empty vocabulary", "manifest", at("model", vocab_size=0), "manifest-invalid"),
    ("a vocabulary beyond the embedding", "manifest", at("model", vocab_size=33), "graph-invalid"),
]  # fmt: skip


@pytest.mark.parametrize(("part", "change", "code"), [row[1:] for row in DOCUMENTS], ids=[row[0] for row in DOCUMENTS])
def test_documents(part: str, change: Callable[[Any], Any], code: str, tmp_path: Path) -> None:
    assert refusal(lambda forgery: forgery.edit(part, change), tmp_path).code == code


BAD_NAMES = ["../x", "..", ".", "", "/etc/x", "a/b", "a\\b", ".hidden", "a\0b", "a\nb", "nul\u0131", "x" * 129, " x"]


@pytest.mark.parametrize("name", BAD_NAMES, ids=[ascii(name)[:20] for name in BAD_NAMES])
def test_tokenizer_name(name: str, tmp_path: Path) -> None:
    def forge(forgery: Forgery) -> None:
        forgery.files = [(name, b"x")]

    assert refusal(forge, tmp_path).code == "name-invalid"


@pytest.mark.parametrize("record", [b"[]", b"1", b"", b'{"a":1,"a":1}', b'{"a": 1}', b'{"a":' * 60])
def test_provenance_record(record: bytes, tmp_path: Path) -> None:
    def forge(forgery: Forgery) -> None:
        forgery.provenance = record

    assert refusal(forge, tmp_path).code in ("json-invalid", "json-duplicate-key", "json-not-canonical")


def test_deep_provenance_record(tmp_path: Path) -> None:
    def forge(forgery: Forgery) -> None:
        forgery.provenance = b'{"a":' + b"[" * 40 + b"]" * 40 + b"}"

    assert refusal(forge, tmp_path).code == "limit-exceeded"


def test_provenance_is_outside_of_the_identity(tmp_path: Path) -> None:
    first = opened(lambda forgery: None, tmp_path)
    (tmp_path / "other").mkdir()

    def forge(forgery: Forgery) -> None:
        forgery.provenance = b'{"host":"elsewhere"}'

    second = opened(forge, tmp_path / "other")

    assert second.provenance != first.provenance
    assert second.digest == first.digest


# --- the graph's frame -----------------------------------------------------------------------------------------


def frame_of(size: int, content: bytes) -> bytes:
    """A zstd frame that declares `size` bytes and holds one raw block of `content`."""
    descriptor = 0b11100000  # 8 bytes of content size, one segment, no checksum, no dictionary
    block = (len(content) << 3 | 1).to_bytes(3, "little")
    return b"\x28\xb5\x2f\xfd" + bytes([descriptor]) + size.to_bytes(8, "little") + block + content


def with_dictionary(raw: bytes) -> bytes:
    samples = [raw[i : i + 100] for i in range(0, len(raw) - 100, 10)]
    dictionary = zstandard.train_dictionary(1000, samples)
    return zstandard.ZstdCompressor(dict_data=dictionary).compress(raw)


SKIPPABLE = b"\x50\x2a\x4d\x18\x01\0\0\0x"
FRAMES: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("empty", lambda raw: b"", "graph-compression"),
    ("not compressed", lambda raw: raw, "graph-compression"),
    ("gzip", lambda raw: b"\x1f\x8b" + raw, "graph-compression"),
    ("cut", lambda raw: compressed(raw)[:-1], "graph-compression"),
    ("head only", lambda raw: compressed(raw)[:5], "graph-compression"),
    ("trailing bytes", lambda raw: compressed(raw) + b"\0", "graph-compression"),
    ("a second frame", lambda raw: compressed(raw) + compressed(b""), "graph-compression"),
    ("a skippable frame before", lambda raw: SKIPPABLE + compressed(raw), "graph-compression"),
    ("a skippable frame behind", lambda raw: compressed(raw) + SKIPPABLE, "graph-compression"),
    ("no content size", lambda raw: compressed(raw, write_content_size=False), "graph-compression"),
    ("a checksum", lambda raw: compressed(raw, write_checksum=True), "graph-compression"),
    ("a dictionary", with_dictionary, "graph-compression"),
    ("more than declared", lambda raw: frame_of(4, b"abcdefgh"), "graph-compression"),
    ("less than declared", lambda raw: frame_of(9, b"abcdefgh"), "graph-compression"),
    ("declares too much", lambda raw: frame_of(limits.MAX_GRAPH_RAW_BYTES + 1, b"abcdefgh"), "limit-exceeded"),
    ("declares 2**63", lambda raw: frame_of(2**63, b"abcdefgh"), "limit-exceeded"),
    ("decompression bomb", lambda raw: compressed(bytes(limits.MAX_GRAPH_RAW_BYTES + 1)), "limit-exceeded"),
]


@pytest.mark.parametrize(("make", "code"), [row[1:] for row in FRAMES], ids=[row[0] for row in FRAMES])
def test_frame(make: Callable[[bytes], bytes], code: str, tmp_path: Path) -> None:
    def forge(forgery: Forgery) -> None:
        forgery.graph = make(forgery.raw_graph)

    error = refusal(forge, tmp_path)

    assert error.code == code
    assert "graph" in error.message


# --- the graph's encoding --------------------------------------------------------------------------------------

SYMBOL = b"\x82\xa3min\x01\xa4name\xa1T"
GRAPHS: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("empty", lambda raw: b"", "graph-encoding"),
    ("null", lambda raw: b"\xc0", "graph-encoding"),
    ("cut", lambda raw: raw[:-1], "graph-encoding"),
    ("cut in half", lambda raw: raw[: len(raw) // 2], "graph-encoding"),
    ("trailing bytes", lambda raw: raw + b"\xc0", "graph-encoding"),
    ("a binary value", swap(SYMBOL, b"\x82\xa3min\x01\xa4name\xc4\x01T"), "graph-encoding"),
    ("an extension", swap(SYMBOL, b"\x82\xa3min\xd4\x01\x01\xa4name\xa1T"), "graph-encoding"),
    ("a timestamp", swap(SYMBOL, b"\x82\xa3min\xd6\xff\0\0\0\x01\xa4name\xa1T"), "graph-encoding"),
    ("a reserved marker", swap(SYMBOL, b"\x82\xa3min\xc1\xa4name\xa1T"), "graph-encoding"),
    ("a float of 32 bits", swap(SYMBOL, b"\x82\xa3min\xca\0\0\0\0\xa4name\xa1T"), "graph-encoding"),
    ("a float for an integer", swap(SYMBOL, b"\x82\xa3min\xcb" + struct.pack(">d", 1.0) + b"\xa4name\xa1T"),
     "graph-encoding"),
    ("an integer of 64 bits", swap(SYMBOL, b"\x82\xa3min\xcf" + b"\x80" + bytes(7) + b"\xa4name\xa1T"),
     "graph-encoding"),
    ("a longer integer", swap(SYMBOL, b"\x82\xa3min\xcc\x01\xa4name\xa1T"), "graph-not-canonical"),
    ("a longer string", swap(SYMBOL, b"\x82\xa3min\x01\xa4name\xd9\x01T"), "graph-not-canonical"),
    ("a longer map", swap(SYMBOL, b"\xde\0\x02\xa3min\x01\xa4name\xa1T"), "graph-not-canonical"),
    ("keys out of order", swap(SYMBOL, b"\x82\xa4name\xa1T\xa3min\x01"), "graph-not-canonical"),
    ("a key twice", swap(SYMBOL, b"\x83\xa3min\x01\xa4name\xa1T\xa4name\xa1T"), "graph-not-canonical"),
    ("a default written out", swap(SYMBOL, b"\x83\xa3max\xc0\xa3min\x01\xa4name\xa1T"), "graph-not-canonical"),
    ("an unknown field", swap(SYMBOL, b"\x83\xa4even\xc3\xa3min\x01\xa4name\xa1T"), "graph-encoding"),
    ("a missing field", swap(SYMBOL, b"\x81\xa3min\x01"), "graph-encoding"),
    ("broken UTF-8", swap(SYMBOL, b"\x82\xa3min\x01\xa4name\xa1\xff"), "graph-encoding"),
    ("a surrogate", swap(SYMBOL, b"\x82\xa3min\x01\xa4name\xa3\xed\xa0\x80"), "graph-encoding"),
    ("a string too long", swap(SYMBOL, b"\x82\xa3min\x01\xa4name\xda\x04\x01" + b"T" * 1025), "limit-exceeded"),
    ("a string longer than all", swap(SYMBOL, b"\x82\xa3min\x01\xa4name\xdb\xff\xff\xff\xff"), "limit-exceeded"),
    ("an array longer than all", lambda raw: b"\xdd\xff\xff\xff\xff" + raw, "limit-exceeded"),
    ("a map longer than all", lambda raw: b"\xdf\xff\xff\xff\xff" + raw, "limit-exceeded"),
    ("an array longer than the input", lambda raw: b"\xdd\0\x06\xff\xff" + raw, "graph-encoding"),
    ("more values than allowed", lambda raw: b"\xdd\0\x0f\xff\xff" + raw, "limit-exceeded"),
    ("a length that is cut", lambda raw: b"\xdd\0\0", "graph-encoding"),
    ("nested arrays", lambda raw: b"\x91" * 100_000 + b"\xc0", "graph-nesting"),
    ("nested maps", lambda raw: b"\x81\xa1a" * 100_000 + b"\xc0", "graph-nesting"),
    ("nested for ever", lambda raw: b"\x91" * 1_000_000, "graph-nesting"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "code"), [row[1:] for row in GRAPHS], ids=[row[0] for row in GRAPHS])
def test_encoding(change: Callable[[bytes], bytes], code: str, tmp_path: Path) -> None:
    def forge(forgery: Forgery) -> None:
        forgery.raw_graph = change(forgery.raw_graph)

    error = refusal(forge, tmp_path)

    assert error.code == code
    assert "graph" in error.message


def nested_recipe(depth: int) -> dict[str, Any]:
    recipe: dict[str, Any] = {"k": "read", "shape": [16], "tensor": "x"}
    for _ in range(depth):
        recipe = {"dtype": "bfloat16", "k": "cast", "of": recipe}
    return recipe


def nested_size(depth: int) -> Any:
    size: Any = "T"
    for _ in range(depth):
        size = {"args": [size, 1], "k": "e", "op": "add"}
    return size


def first_node(graph: Any) -> Any:
    return graph["blocks"][0]["nodes"][0]


def scale(value: float) -> Callable[[Any], None]:
    return lambda graph: first_node(graph)["args"]["eps"].update(value=value)


CONTENTS: list[tuple[str, Callable[[Any], None], str]] = [
    ("not a number", scale(float("nan")), "graph-encoding"),
    ("negative not a number", scale(struct.unpack(">d", b"\xff\xf8" + bytes(6))[0]), "graph-encoding"),
    ("a recipe nested deep", at("params", -1, recipe=nested_recipe(100)), "graph-nesting"),
    ("a recipe nested very deep", at("params", -1, recipe=nested_recipe(900)), "graph-nesting"),
    ("an expression nested deep", at("inputs", 0, "type", shape=[nested_size(100)]), "graph-nesting"),
    ("an unknown kind of recipe", at("params", -1, recipe={"k": "pickle", "of": "x"}), "graph-encoding"),
    ("an unknown operation", at("inputs", 0, "type", shape=[{"args": ["T", 2], "k": "e", "op": "pow"}]),
     "graph-encoding"),
    ("an unknown dtype", at("inputs", 0, "type", dtype="int4"), "graph-encoding"),
    ("true for an integer", at("symbols", 0, min=True), "graph-encoding"),
    ("an undefined name", lambda graph: first_node(graph)["args"]["x"].update(name="nowhere"), "graph-invalid"),
    ("a wrong shape", at("inputs", 0, "type", shape=[2, "T"]), "graph-invalid"),
    ("a division by zero", at("inputs", 0, "type", shape=[1, {"args": ["T", 0], "k": "e", "op": "mod"}]),
     "graph-invalid"),
    ("logits that are a param", lambda graph: graph["outputs"].update(logits="embed"), "graph-invalid"),
    ("logits that are an input", lambda graph: graph["outputs"].update(logits="input_ids"), "graph-invalid"),
    ("no logits", lambda graph: graph["outputs"].update(scores=graph["outputs"].pop("logits")), "graph-invalid"),
    ("a recipe of a wrong shape", at("params", 0, "recipe", "of", shape=[1, 2]), "graph-invalid"),
    ("a size that explodes", at("inputs", 0, "type", shape=[1, {"args": [nested_size(1)] * 30, "k": "e", "op": "mul"}]),
     "graph-invalid"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "code"), [row[1:] for row in CONTENTS], ids=[row[0] for row in CONTENTS])
def test_graph(change: Callable[[Any], None], code: str, tmp_path: Path) -> None:
    assert refusal(lambda forgery: forgery.edit_graph(change), tmp_path).code == code


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), -0.0, 1e308, 5e-324])
def test_floats_that_are_numbers_keep_their_bits(value: float, tmp_path: Path) -> None:
    bundle = opened(lambda forgery: forgery.edit_graph(scale(value)), tmp_path)

    found = msgspec.to_builtins(bundle.graph)["blocks"][0]["nodes"][0]["args"]["eps"]["value"]
    assert struct.pack(">d", found) == struct.pack(">d", value)


# --- constants -------------------------------------------------------------------------------------------------


def with_header(header: bytes, data: bytes = bytes(8)) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


ENTRY = b'{"inv_freq":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}  '
TENSORS: list[tuple[str, bytes, str]] = [
    ("empty", b"", "constants-invalid"),
    ("cut", with_header(ENTRY)[:-1], "constants-invalid"),
    ("trailing bytes", with_header(ENTRY) + b"\0", "constants-invalid"),
    ("a header longer than the file", struct.pack("<Q", 1000) + ENTRY, "constants-invalid"),
    ("a header of 2**63 bytes", struct.pack("<Q", 2**63) + ENTRY, "constants-invalid"),
    ("a header that is no object", with_header(b"[]      "), "constants-invalid"),
    ("an unknown field", with_header(ENTRY.replace(b'"dtype"', b'"x":1,"dtype"')), "constants-invalid"),
    ("metadata", with_header(b'{"__metadata__":{"a":"b"},' + ENTRY[1:]), "constants-invalid"),
    ("white space", with_header(ENTRY.replace(b":[2]", b": [2]")), "constants-invalid"),
    ("no padding", with_header(ENTRY.strip()), "constants-invalid"),
    ("an unknown dtype", with_header(ENTRY.replace(b"F32", b"F31")), "constants-invalid"),
    ("a hole", with_header(ENTRY.replace(b"[0,8]", b"[4,12]"), bytes(12)), "constants-invalid"),
    ("a wrong size", with_header(ENTRY.replace(b"[2]", b"[3]")), "constants-invalid"),
    ("a negative size", with_header(ENTRY.replace(b"[2]", b"[-2]")), "constants-invalid"),
    ("a nested header", with_header(b'{"a":' * 50_000), "constants-invalid"),
    ("none", tensorfile.encode({}), "constants-mismatch"),
    ("one more", tensorfile.encode({"inv_freq": ("float32", (2,), bytes(8)), "x": ("bool", (), b"\1")}),
     "constants-mismatch"),
    ("another dtype", tensorfile.encode({"inv_freq": ("int32", (2,), bytes(8))}), "constants-mismatch"),
    ("another shape", tensorfile.encode({"inv_freq": ("float32", (1, 2), bytes(8))}), "constants-mismatch"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "code"), [row[1:] for row in TENSORS], ids=[row[0] for row in TENSORS])
def test_constants(data: bytes, code: str, tmp_path: Path) -> None:
    def forge(forgery: Forgery) -> None:
        forgery.constants = data

    assert refusal(forge, tmp_path).code == code


# --- errors ----------------------------------------------------------------------------------------------------


def test_an_unlisted_code_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        BundleError("no-such-code", "x")


def test_codes_are_kebab_case_with_a_meaning() -> None:
    for code, meaning in CODES.items():
        assert code == code.lower().replace("_", "-").replace(" ", "-")
        assert meaning
