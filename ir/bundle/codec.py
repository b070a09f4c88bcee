"""Structs to bytes and back, with one encoding for each value.

A graph is msgpack under zstd, everything else JSON. In both, a struct is a map whose keys stand in ascending order
of their UTF-8 bytes, and fields equal to their default are left out. Decoding is strict: unknown fields are refused,
and so is input that differs from the encoding of what it decodes to. The zstd frame alone is free, because later
versions of libzstd compress differently; its form is not (`docs/format/v1.md`, Graph).
"""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

import msgspec
import zstandard

from precast.ir import limits
from precast.ir.bundle import versions
from precast.ir.bundle.scan import scan
from precast.ir.errors import BundleError
from precast.ir.graph.schema import CachePlan, Graph
from precast.ir.manifest import Manifest

T = TypeVar("T")

ZSTD_LEVEL = 19
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_NO_CACHES: CachePlan = msgspec.structs.fields(Graph)[-1].default


class _Versioned(msgspec.Struct):
    """The one field of a manifest that every version has."""

    format: tuple[int, int]


# --- graph -----------------------------------------------------------------------------------------------------


def encode_graph(graph: Graph) -> bytes:
    """The graph's blob: one zstd frame with its content size, no checksum and no dictionary, made by one thread.

    Raises BundleError where `graph` has no valid encoding: NaN, integers beyond 63 bits, too deep, too large.
    """
    raw = _encode_raw(graph)
    _decode_raw(raw, Graph)
    compressor = zstandard.ZstdCompressor(
        level=ZSTD_LEVEL, threads=0, write_content_size=True, write_checksum=False, write_dict_id=False
    )
    return compressor.compress(raw)


def decode_graph(data: bytes, format: tuple[int, int] = versions.FORMAT) -> Graph:
    """The graph in a blob of a bundle of this format, as a graph of the current one.

    Raises BundleError: `graph-compression`, `graph-encoding`, `graph-not-canonical`, `graph-nesting`,
    `limit-exceeded`, `format-newer` or `format-unknown`.
    """
    era = versions.era(format)
    old: Any = _decode_raw(_decompress(data), era.graph)
    graph: Graph = versions.upgrade_graph(old, format)
    return graph


def _encode_raw(graph: Any) -> bytes:
    if isinstance(graph, Graph) and graph.caches == _NO_CACHES:
        # A field is left out when it *is* its default; an equal one would make a second encoding of the same graph.
        graph = msgspec.structs.replace(graph, caches=_NO_CACHES)
    try:
        return msgspec.msgpack.encode(graph, order="sorted")
    except OverflowError:
        raise BundleError("graph-encoding", "graph: an integer beyond 64 bits") from None
    except RecursionError:
        raise BundleError("graph-nesting", "graph: values are nested too deep to be encoded") from None


def _decode_raw(raw: bytes, graph_type: type[T]) -> T:
    scan(raw)
    try:
        graph = msgspec.msgpack.decode(raw, type=graph_type)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BundleError("graph-encoding", f"graph: {error}") from None
    except RecursionError:
        raise BundleError("graph-nesting", "graph: values are nested too deep to be decoded") from None
    again = _encode_raw(graph)
    if again != raw:
        place = _first_difference(again, raw)
        message = f"graph: differs from its canonical encoding from byte {place} on"
        raise BundleError("graph-not-canonical", f"{message}: expected {len(again)} bytes, found {len(raw)}")
    return graph


def _decompress(data: bytes) -> bytes:
    """The content of exactly one zstd frame, whose size is declared and allowed."""
    if len(data) > limits.MAX_GRAPH_BYTES:
        message = f"graph: {len(data)} bytes; at most {limits.MAX_GRAPH_BYTES} are allowed"
        raise BundleError("limit-exceeded", message)
    if data[:4] != _ZSTD_MAGIC:
        raise BundleError("graph-compression", f"graph: expected a zstd frame, found bytes {data[:4].hex() or 'none'}")
    try:
        frame = zstandard.get_frame_parameters(data)
        if frame.content_size == zstandard.CONTENTSIZE_UNKNOWN:
            raise BundleError("graph-compression", "graph: the zstd frame doesn't declare the size of its content")
        if frame.content_size > limits.MAX_GRAPH_RAW_BYTES:
            message = f"graph: {frame.content_size} bytes unpacked; at most {limits.MAX_GRAPH_RAW_BYTES} are allowed"
            raise BundleError("limit-exceeded", message)
        if frame.dict_id or frame.has_checksum:
            raise BundleError("graph-compression", "graph: expected a zstd frame without dictionary and checksum")
        raw = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BundleError("graph-compression", f"graph: the zstd frame is damaged: {error}") from None
    if len(raw) != frame.content_size:
        message = f"graph: expected {frame.content_size} bytes unpacked, as declared, found {len(raw)}"
        raise BundleError("graph-compression", message)
    return raw


# --- JSON ------------------------------------------------------------------------------------------------------


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as canonical JSON."""
    return encode_json(manifest)


def decode_manifest(data: bytes) -> Manifest:
    """The manifest in the bundle's config blob, of any version that is supported, as one of the current version.

    Its `format` stays what the bundle says. Raises BundleError: `format-newer`, `format-unknown`, `json-invalid`,
    `json-duplicate-key`, `json-not-canonical` or `limit-exceeded`.
    """
    _check_size(data, "manifest", limits.MAX_JSON_BYTES)
    # The version comes first: fields of a newer one must be reported as that, not as unknown.
    format = _parse(data, _Versioned, "manifest").format
    era = versions.era(format)
    manifest: Manifest = versions.upgrade_manifest(decode_json(data, era.manifest, "manifest"), format)
    return manifest


def encode_json(value: Any) -> bytes:
    """Canonical JSON: UTF-8, no white space, keys of every object in ascending order, defaults left out."""
    return msgspec.json.encode(value, order="sorted")


def decode_json(data: bytes, type: type[T], what: str, limit: int = limits.MAX_JSON_BYTES) -> T:
    """The value of this type in canonical JSON; `what` names the document in messages.

    Raises BundleError: `json-invalid`, `json-duplicate-key`, `json-not-canonical` or `limit-exceeded`.
    """
    value = decode_foreign_json(data, type, what, limit)
    again = encode_json(value)
    if again != data:
        place = _first_difference(again, data)
        message = f"{what}: differs from its canonical encoding from byte {place} on"
        raise BundleError("json-not-canonical", f"{message}: expected {len(again)} bytes, found {len(data)}")
    return value


def decode_foreign_json(data: bytes, type: type[T], what: str, limit: int) -> T:
    """The value of this type in JSON of any layout; for documents that other tools rewrite. No key stands twice.

    Raises BundleError: `json-invalid`, `json-duplicate-key` or `limit-exceeded`.
    """
    _check_size(data, what, limit)
    value = _parse(data, type, what)
    plain = _parse(data, Any, what)
    _check_plain(plain, what)
    if msgspec.json.encode(plain) != data:
        _refuse_duplicates(data, what)
    return value


def _check_size(data: bytes, what: str, limit: int) -> None:
    if len(data) > limit:
        raise BundleError("limit-exceeded", f"{what}: {len(data)} bytes; at most {limit} are allowed")


def _parse(data: bytes, type: Any, what: str) -> Any:
    try:
        return msgspec.json.decode(data, type=type)
    except (msgspec.DecodeError, ValueError) as error:  # ValueError: broken UTF-8, integers of thousands of digits
        raise BundleError("json-invalid", f"{what}: {error}") from None
    except RecursionError:
        raise BundleError("json-invalid", f"{what}: values are nested too deep to be decoded") from None


def _check_plain(plain: Any, what: str) -> None:
    """Integers fit 63 bits and a sign; nesting ends. Iterative, so that no depth costs stack."""
    level, depth = [plain], 0
    while level:
        depth += 1
        if depth > limits.MAX_JSON_NESTING:
            message = f"{what}: nested more than {limits.MAX_JSON_NESTING} levels deep"
            raise BundleError("limit-exceeded", message)
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            elif isinstance(item, int) and not -(1 << 63) <= item < 1 << 63:
                raise BundleError("json-invalid", f"{what}: an integer beyond 63 bits")
        level = below


def _refuse_duplicates(data: bytes, what: str) -> None:
    """Raise where an object has a key twice: parsers disagree on which one counts, and msgspec says nothing."""
    # The standard parser is slower and only needed here, where the bytes are not what msgspec would have written.
    import json

    def pairs(items: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for key, _ in items:
            if key in seen:
                refuse(key)
            seen.add(key)

    def refuse(key: str) -> NoReturn:
        raise BundleError("json-duplicate-key", f"{what}: the key {key!r} stands twice in one object")

    json.loads(data, object_pairs_hook=pairs)


def _first_difference(a: bytes, b: bytes) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
