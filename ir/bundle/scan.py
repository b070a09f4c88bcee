"""A look at msgpack before it is decoded: iterative, so that no depth of nesting costs stack, and counted as it goes.

A packed blob holds a subset of msgpack: nil, booleans, integers that fit 64 signed bits, float64 that is not
NaN, UTF-8 strings, arrays and maps; binary values where images are held. Extension and float32 values are refused.
"""

from __future__ import annotations

from typing import NamedTuple

from precast.ir import limits
from precast.ir.errors import BundleError

_FIXMAP, _FIXARRAY = range(0x80, 0x90), range(0x90, 0xA0)
# Marker -> bytes of the whole value, for those whose marker alone says it; 0 for all others.
_WHOLE = bytes(
    1 if marker < 0x80 or marker >= 0xE0 or marker in (0xC0, 0xC2, 0xC3)
    else 1 + (marker & 31) if 0xA0 <= marker < 0xC0
    else {0xCC: 2, 0xCD: 3, 0xCE: 5, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}.get(marker, 0)
    for marker in range(256)
)  # fmt: skip
# Marker -> (bytes of the length that follows, values per counted item)
_CONTAINERS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
_STRINGS = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_BINARY = {0xC4: 1, 0xC5: 2, 0xC6: 4}


class Caps(NamedTuple):
    """How much a packed blob may hold: bytes as it is stored and unpacked, values, and bytes of one binary value."""

    packed_bytes: int
    raw_bytes: int
    objects: int
    binary_bytes: int = -1


GRAPH_CAPS = Caps(limits.MAX_GRAPH_BYTES, limits.MAX_GRAPH_RAW_BYTES, limits.MAX_GRAPH_OBJECTS)
NATIVE_CAPS = Caps(
    limits.MAX_NATIVE_BYTES, limits.MAX_NATIVE_RAW_BYTES, limits.MAX_NATIVE_OBJECTS, limits.MAX_IMAGE_BYTES
)


def scan(data: bytes, what: str, caps: Caps = GRAPH_CAPS) -> None:
    """Check that `data` is one value of the subset, complete, within the limits of depth, count and string length.

    `what` names the blob in messages and codes. Raises BundleError: for a graph, `graph-encoding`, `graph-nesting` or
    `limit-exceeded`.
    """
    whole = _WHOLE
    position, left, objects = 0, 1, 0
    outer: list[int] = []
    try:
        while True:
            while left:
                left -= 1
                marker = data[position]
                step = whole[marker]
                if step:
                    position += step
                    continue
                position, inner = _other(data, position, marker, what, caps)
                if inner >= 0:
                    outer.append(left)
                    left = inner
                    objects += inner
                    if len(outer) > limits.MAX_NESTING or objects > caps.objects:
                        _too_much(len(outer), objects, what, caps)
            if not outer:
                break
            left = outer.pop()
    except IndexError:
        message = f"{what}: the encoding ends inside a value, after {len(data)} bytes"
        raise BundleError(f"{what}-encoding", message) from None
    if position != len(data):
        more = "ends inside a value" if position > len(data) else "goes on after its value"
        message = f"{what}: the encoding {more}: expected {position} bytes, found {len(data)}"
        raise BundleError(f"{what}-encoding", message)


def _other(data: bytes, position: int, marker: int, what: str, caps: Caps) -> tuple[int, int]:
    """(position after the value or its head, values inside it or -1) for a marker that doesn't say its own length."""
    if marker in _FIXMAP:
        return position + 1, 2 * (marker & 15)
    if marker in _FIXARRAY:
        return position + 1, marker & 15
    if marker in _CONTAINERS:
        width, per_item = _CONTAINERS[marker]
        return position + 1 + width, per_item * _length(data, position, width)
    if marker in _STRINGS or (marker in _BINARY and caps.binary_bytes >= 0):
        width = _STRINGS.get(marker) or _BINARY[marker]
        kind, most = ("string", limits.MAX_STRING_BYTES) if marker in _STRINGS else ("image", caps.binary_bytes)
        size = _length(data, position, width)
        if size > most:
            message = f"{what}: {'an' if kind == 'image' else 'a'} {kind} of {size} bytes at byte {position}"
            raise BundleError("limit-exceeded", f"{message}; at most {most} are allowed")
        return position + 1 + width + size, -1
    return position + _number(data, position, marker, what), -1


def _length(data: bytes, position: int, width: int) -> int:
    field = data[position + 1 : position + 1 + width]
    if len(field) != width:
        raise IndexError
    return int.from_bytes(field, "big")


def _number(data: bytes, position: int, marker: int, what: str) -> int:
    """The size of a float64 or uint64, or a refusal of what the subset doesn't have."""
    if marker == 0xCB:
        bits = _length(data, position, 8)
        if (bits & 0x7FFF_FFFF_FFFF_FFFF) > 0x7FF0_0000_0000_0000:
            raise BundleError(f"{what}-encoding", f"{what}: a float that is not a number (NaN) at byte {position}")
        return 9
    if marker == 0xCF:
        if _length(data, position, 8) >= 1 << 63:
            raise BundleError(f"{what}-encoding", f"{what}: an integer beyond 63 bits at byte {position}")
        return 9
    message = f"{what}: a value of msgpack type {marker:#04x}, not in use, at byte {position}"
    raise BundleError(f"{what}-encoding", message)


def _too_much(depth: int, objects: int, what: str, caps: Caps) -> None:
    if depth > limits.MAX_NESTING:
        message = f"{what}: values are nested more than {limits.MAX_NESTING} levels deep"
        raise BundleError(f"{what}-nesting", message)
    message = f"{what}: {objects} values or more; at most {caps.objects} are allowed"
    raise BundleError("limit-exceeded", message)
