"""Tensors that say of which group each input is, where recipes take groups of neighbours for granted.

Nothing computes with them (`Checkpoint.groups_in_order`): what they hold is compared with that, and no more.
"""

from __future__ import annotations

from precast.ir.weights.checkpoint import CheckpointFiles

_COMPARED = 1 << 20
"""Inputs whose groups are read at a time."""
_BYTES = 4
"""Of an int32, as safetensors files hold it: the lowest first."""


def fault(files: CheckpointFiles, name: str, size: int) -> str:
    """What is wrong with a tensor, int32 `[inputs]`, whose input i is to be of group i // `size` (0: all are of group
    0); empty: nothing. Raises WeightsError where it can't be read.
    """
    tensor = files.tensors[name]
    if tensor.dtype != "int32" or len(tensor.shape) != 1:
        return f"expected int32 [inputs], found {tensor.dtype} {list(tensor.shape)}"
    (inputs,) = tensor.shape
    with files.source(tensor.file) as source:
        for start in range(0, inputs, _COMPARED):
            expected = _in_order(start, min(start + _COMPARED, inputs), size)
            found = bytearray(len(expected))
            source.read_into(tensor.offset + _BYTES * start, [memoryview(found)])
            if found != expected:
                return _first_difference(start, found, expected)
    return ""


def _in_order(start: int, end: int, size: int) -> bytes:
    """The groups of inputs `start .. end`."""
    size = size or end
    groups = range(start // size, -(-end // size))
    counts = (min((group + 1) * size, end) - max(group * size, start) for group in groups)
    return b"".join(group.to_bytes(_BYTES, "little") * count for group, count in zip(groups, counts, strict=True))


def _first_difference(start: int, found: bytearray, expected: bytes) -> str:
    for place in range(0, len(found), _BYTES):
        one, other = (int.from_bytes(each[place : place + _BYTES], "little", signed=True) for each in (found, expected))
        if one != other:
            return f"input {start + place // _BYTES} is of group {one}, expected {other}"
    raise AssertionError("they are equal")
