"""Structs to bytes and back, with one encoding for each value. Which structs, the callers say.

*Packed* is msgpack under zstd; all else is JSON. In both, a struct is a map whose keys stand in ascending order of
their UTF-8 bytes, and fields equal to their default are left out. Decoding is strict: unknown fields are refused,
and so is input that differs from the encoding of what it decodes to. The zstd frame alone is free, because later
versions of libzstd compress differently; its form is not (`docs/format/v1.md`, Graph).
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import zstandard

from precast.ir import limits
from precast.ir.bundle.scan import GRAPH_CAPS, Caps, scan
from precast.ir.errors import BundleError, shown

T = TypeVar("T")

ZSTD_LEVEL = 19
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


# --- packed ----------------------------------------------------------------------------------------------------


def encode_packed(value: msgspec.Struct, what: str, caps: Caps = GRAPH_CAPS) -> bytes:
    """A struct's blob: one zstd frame with its content size, no checksum and no dictionary, made by one thread.

    `what` names the blob in messages and codes. Raises BundleError where `value` has no valid encoding: NaN, integers
    beyond 63 bits, too deep, too large.
    """
    raw = _encode_raw(value, what)
    _decode_raw(raw, type(value), what, caps)
    compressor = zstandard.ZstdCompressor(
        level=ZSTD_LEVEL, threads=0, write_content_size=True, write_checksum=False, write_dict_id=False
    )
    return compressor.compress(raw)


def decode_packed(data: bytes, type: type[T], what: str, caps: Caps = GRAPH_CAPS) -> T:
    """The struct of this type in a blob; `what` names it in messages and codes.

    Raises BundleError: for a graph, `graph-compression`, `graph-encoding`, `graph-not-canonical`, `graph-nesting` or
    `limit-exceeded`.
    """
    return _decode_raw(_decompress(data, what, caps), type, what, caps)


def _encode_raw(value: Any, what: str) -> bytes:
    try:
        return msgspec.msgpack.encode(_without_defaults(value), order="sorted")
    except OverflowError:
        raise BundleError(f"{what}-encoding", f"{what}: an integer beyond 64 bits") from None
    except RecursionError:
        raise BundleError(f"{what}-nesting", f"{what}: values are nested too deep to be encoded") from None


def _without_defaults(value: Any) -> Any:
    """The struct with its defaults for what equals them: msgspec leaves out the very default, and no equal one."""
    equal = {
        field.name: field.default
        for field in msgspec.structs.fields(value)
        if isinstance(field.default, msgspec.Struct) and getattr(value, field.name) == field.default
    }
    return msgspec.structs.replace(value, **equal)


def _decode_raw(raw: bytes, type: type[T], what: str, caps: Caps) -> T:
    scan(raw, what, caps)
    try:
        value = msgspec.msgpack.decode(raw, type=type)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BundleError(f"{what}-encoding", f"{what}: {shown(str(error))}") from None
    except RecursionError:
        raise BundleError(f"{what}-nesting", f"{what}: values are nested too deep to be decoded") from None
    _check_canonical(_encode_raw(value, what), raw, what, f"{what}-not-canonical")
    return value


def _decompress(data: bytes, what: str, caps: Caps) -> bytes:
    """The content of exactly one zstd frame, whose size is declared and allowed."""
    _check_size(data, what, caps.packed_bytes)
    if data[:4] != _ZSTD_MAGIC:
        message = f"{what}: expected a zstd frame, found bytes {data[:4].hex() or 'none'}"
        raise BundleError(f"{what}-compression", message)
    try:
        frame = zstandard.get_frame_parameters(data)
        if frame.content_size == zstandard.CONTENTSIZE_UNKNOWN:
            raise BundleError(f"{what}-compression", f"{what}: the zstd frame doesn't declare the size of its content")
        if frame.content_size > caps.raw_bytes:
            message = f"{what}: {frame.content_size} bytes unpacked; at most {caps.raw_bytes} are allowed"
            raise BundleError("limit-exceeded", message)
        if frame.dict_id or frame.has_checksum:
            raise BundleError(f"{what}-compression", f"{what}: expected a zstd frame without dictionary and checksum")
        raw = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BundleError(f"{what}-compression", f"{what}: the zstd frame is damaged: {error}") from None
    if len(raw) != frame.content_size:
        message = f"{what}: expected {frame.content_size} bytes unpacked, as declared, found {len(raw)}"
        raise BundleError(f"{what}-compression", message)
    return raw


# --- JSON ------------------------------------------------------------------------------------------------------


def encode_json(value: Any) -> bytes:
    """Canonical JSON: UTF-8, no white space, keys of every object in ascending order, defaults left out."""
    return msgspec.json.encode(value, order="sorted")


def decode_json(data: bytes, type: type[T], what: str, limit: int = limits.MAX_JSON_BYTES) -> T:
    """The value of this type in canonical JSON; `what` names the document in messages.

    Raises BundleError: `json-invalid`, `json-duplicate-key`, `json-not-canonical` or `limit-exceeded`.
    """
    value = decode_foreign_json(data, type, what, limit)
    _check_canonical(encode_json(value), data, what, "json-not-canonical")
    return value


def decode_foreign_json(data: bytes, type: type[T], what: str, limit: int) -> T:
    """The value of this type in JSON of any layout; for documents that other tools rewrite. No key stands twice.

    Raises BundleError: `json-invalid`, `json-duplicate-key` or `limit-exceeded`.
    """
    _check_size(data, what, limit)
    value = _parse(data, type, what)
    plain: Any = _parse(data, object, what)
    _check_plain(plain, what)
    if msgspec.json.encode(plain) != data:
        _refuse_duplicates(data, what)
    return value


def peek_json(data: bytes, type: type[T], what: str, limit: int) -> T:
    """Those fields of a JSON object that this type has; whatever else is there is not looked at.

    Raises BundleError: `json-invalid` or `limit-exceeded`.
    """
    _check_size(data, what, limit)
    return _parse(data, type, what)


def _check_size(data: bytes, what: str, limit: int) -> None:
    if len(data) > limit:
        raise BundleError("limit-exceeded", f"{what}: {len(data)} bytes; at most {limit} are allowed")


def _parse(data: bytes, type: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(data, type=type)
    except (msgspec.DecodeError, ValueError) as error:  # ValueError: broken UTF-8, integers of thousands of digits
        raise BundleError("json-invalid", f"{what}: {shown(str(error))}") from None
    except RecursionError:
        raise _nested_too_deep(what) from None


def _nested_too_deep(what: str) -> BundleError:
    return BundleError("json-invalid", f"{what}: values are nested too deep to be decoded")


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
                raise BundleError(
                    "json-duplicate-key", f"{what}: the key {shown(repr(key))} stands twice in one object"
                )
            seen.add(key)

    try:
        json.loads(data, object_pairs_hook=pairs)
    except RecursionError:  # of a value whose place another one under the same key has taken
        raise _nested_too_deep(what) from None


def _check_canonical(expected: bytes, found: bytes, what: str, code: str) -> None:
    if expected == found:
        return
    pairs = zip(expected, found, strict=False)
    place = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(expected), len(found)))
    message = f"{what}: differs from its canonical encoding from byte {place} on"
    raise BundleError(code, f"{message}: expected {len(expected)} bytes, found {len(found)}")
