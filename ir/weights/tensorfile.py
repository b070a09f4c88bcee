"""The safetensors container without torch: headers of checkpoints, and whole files of constants.

A file is 8 bytes of header length (little endian), the header as JSON, and the tensors' bytes, row-major and little
endian. Reading is strict where safetensors is: no byte is unaccounted for, no byte belongs to two tensors. Files of
constants are also canonical: `decode` refuses what `encode` would not have written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from precast.ir import limits
from precast.ir.errors import shown
from precast.ir.weights.sources import Source

# The file's names of the element types that the schema knows, in the schema's words.
_FROM_FILE = {
    "BOOL": "bool", "I8": "int8", "U8": "uint8", "I32": "int32", "I64": "int64",
    "F8_E4M3": "float8_e4m3fn", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
}  # fmt: skip
FILE_DTYPES = {dtype: name for name, dtype in _FROM_FILE.items()}
"""The file's names of the element types of the schema."""

# Bits of an element. Types that only checkpoints have keep the file's name.
_BITS = {
    "bool": 8, "int8": 8, "uint8": 8, "int32": 32, "int64": 64,
    "float8_e4m3fn": 8, "float16": 16, "bfloat16": 16, "float32": 32, "float64": 64,
    "I16": 16, "U16": 16, "U32": 32, "U64": 64, "C64": 64,
    "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip

Tensor = tuple[str, tuple[int, ...], Any]
"""(dtype, shape, bytes-like content) of a tensor."""


class TensorFileError(ValueError):
    """A file that is no valid safetensors file. Callers say what that means: a bad checkpoint, or a bad bundle."""


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of a file: bytes `start` to `end` of the file. `dtype` in the schema's words, or the file's own."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.end - self.start


_Size = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class _RawEntry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=limits.MAX_RANK)]
    data_offsets: tuple[_Size, _Size]


def element_bytes(dtype: str) -> int:
    """The size of one element of a type of the schema, in bytes."""
    return _BITS[dtype] // 8


def read_header(source: Source | bytes) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file by name, in file order, from the file or its content.

    Reads the header only; the file's size is compared with what the header says. Raises TensorFileError, and
    WeightsError where the file can't be read.
    """
    if isinstance(source, bytes):
        return _header(source[: 8 + _header_length(source[:8], len(source))], len(source))
    first = bytearray(min(8, source.size))
    source.read_into(0, [memoryview(first)])
    head = bytearray(8 + _header_length(first, source.size))
    source.read_into(0, [memoryview(head)])
    return _header(bytes(head), source.size)


def encode(tensors: Mapping[str, Tensor]) -> bytes:
    """The canonical file of these tensors: the largest elements first, then by name; header padded to 8 bytes.

    Raises TensorFileError where a content has another size than its dtype and shape say.
    """
    entries: dict[str, Any] = {}
    contents = []
    position = 0
    for name in sorted(tensors, key=lambda name: (-_BITS[tensors[name][0]], name)):
        dtype, shape, content = tensors[name]
        view = memoryview(content).cast("B")
        expected = math.prod(shape) * element_bytes(dtype)
        if len(view) != expected:
            raise TensorFileError(f"{shown(name)}: {dtype} {list(shape)} takes {expected} bytes, found {len(view)}")
        entries[name] = {"dtype": FILE_DTYPES[dtype], "shape": shape, "data_offsets": (position, position + expected)}
        contents.append(view)
        position += expected
    header = msgspec.json.encode(entries)
    header += b" " * (-len(header) % 8)
    return b"".join([len(header).to_bytes(8, "little"), header, *contents])


def decode(data: bytes) -> dict[str, tuple[str, tuple[int, ...], memoryview]]:
    """The tensors of a canonical file by name; the contents are views of `data`.

    Raises TensorFileError, also for a valid file that `encode` would have written differently.
    """
    view = memoryview(data)
    tensors = {
        name: (entry.dtype, entry.shape, view[entry.start : entry.end]) for name, entry in read_header(data).items()
    }
    for name, (dtype, _, _) in tensors.items():
        if dtype not in FILE_DTYPES:
            raise TensorFileError(f"{shown(name)}: dtype {dtype} is none of {', '.join(FILE_DTYPES)}")
    if encode(tensors) != data:
        raise TensorFileError("the file differs from its canonical encoding")
    return tensors


def _header_length(first: bytes | bytearray, file_size: int) -> int:
    if len(first) < 8:
        raise TensorFileError(f"expected at least 8 bytes, found {len(first)}")
    length = int.from_bytes(first, "little")
    if length > limits.MAX_TENSOR_HEADER_BYTES:
        raise TensorFileError(f"a header of {length} bytes; at most {limits.MAX_TENSOR_HEADER_BYTES} are allowed")
    if 8 + length > file_size:
        raise TensorFileError(f"the header ends at byte {8 + length}, the file at byte {file_size}")
    return length


def _header(head: bytes, file_size: int) -> dict[str, TensorEntry]:
    """The entries of a header, given with its length field, of a file of this size."""
    # Each entry has a brace at least, and those of names and metadata are few.
    if head.count(b"{") > 2 * limits.MAX_FILE_TENSORS:
        raise TensorFileError(f"more than {limits.MAX_FILE_TENSORS} tensors in one file")
    try:
        raw: dict[str, msgspec.Raw] = msgspec.json.decode(head[8:], type=dict[str, msgspec.Raw])
        if "__metadata__" in raw:
            msgspec.json.decode(raw.pop("__metadata__"), type=dict[str, str])
        if len(raw) > limits.MAX_FILE_TENSORS:
            raise TensorFileError(f"{len(raw)} tensors in one file; at most {limits.MAX_FILE_TENSORS} are allowed")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TensorFileError(f"the header doesn't parse: {shown(str(error))}") from None
    except RecursionError:
        raise TensorFileError("the header doesn't parse: it is nested too deep") from None
    return _placed({name: _entry(name, entry) for name, entry in raw.items()}, len(head), file_size)


_ENTRY = msgspec.json.Decoder(_RawEntry)


def _entry(name: str, encoded: msgspec.Raw) -> _RawEntry:
    if len(name) > limits.MAX_STRING_BYTES:
        raise TensorFileError(f"the name {shown(name, 80)} has more than {limits.MAX_STRING_BYTES} characters")
    try:
        return _ENTRY.decode(encoded)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TensorFileError(f"the header doesn't parse: {shown(name)}: {shown(str(error))}") from None
    except RecursionError:
        raise TensorFileError("the header doesn't parse: it is nested too deep") from None


def _placed(found: Mapping[str, _RawEntry], data_start: int, file_size: int) -> dict[str, TensorEntry]:
    """The entries in file order, each byte after the header in exactly one of them."""
    entries = {}
    position = 0
    for name, raw in sorted(found.items(), key=lambda item: (item[1].data_offsets, item[0])):
        start, end = raw.data_offsets
        if start != position:
            kind = "overlap" if start < position else "leave a hole"
            message = f"tensors {kind}: it starts at {start}, the one before it ends at {position}"
            raise TensorFileError(f"{shown(name)}: {message}")
        if end < start or any(size < 0 for size in raw.shape):
            message = f"a negative size: shape {list(raw.shape)}, bytes {start} to {end}"
            raise TensorFileError(f"{shown(name)}: {message}")
        dtype = _FROM_FILE.get(raw.dtype, raw.dtype)
        bits = math.prod(raw.shape) * _BITS[dtype] if dtype in _BITS else None
        if bits is not None and bits != 8 * (end - start):
            needed = f"takes {bits / 8:g} bytes" if bits < 2**64 else "takes more than 2^61 bytes"
            raise TensorFileError(f"{shown(name)}: {dtype} {list(raw.shape)} {needed}, found {end - start}")
        entries[name] = TensorEntry(dtype, raw.shape, data_start + start, data_start + end)
        position = end
    if data_start + position != file_size:
        raise TensorFileError(f"the last tensor ends at byte {data_start + position}, the file at byte {file_size}")
    return entries
