"""Tensors that some writers store and no model has, as they are all 0: biases of layers that have none.

Nothing computes with them (`Checkpoint.zeros`): it is looked at whether they are what they are taken for.
"""

from __future__ import annotations

from precast.ir.graph.schema import Dtype
from precast.ir.weights.checkpoint import CheckpointFiles
from precast.ir.weights.tensorfile import element_bytes

_FLOATS: tuple[Dtype, ...] = ("float32", "float16", "bfloat16")
_READ = 1 << 20
"""Elements that are read at a time."""
_NO_SIGN = bytes(byte & 0x7F for byte in range(256))
"""Makes the last byte of -0.0 that of 0.0."""


def fault(files: CheckpointFiles, name: str, size: int) -> str:
    """What is wrong with a tensor that is to be floating point `[size]` (0: of any size), all 0; empty: nothing.

    Raises WeightsError where it can't be read.
    """
    tensor = files.tensors[name]
    if tensor.dtype not in _FLOATS or len(tensor.shape) != 1 or (size and tensor.shape != (size,)):
        return f"expected {' or '.join(_FLOATS)} [{size or 'outputs'}], found {tensor.dtype} {list(tensor.shape)}"
    (elements,), width = tensor.shape, element_bytes(tensor.dtype)
    with files.source(tensor.file) as source:
        for start in range(0, elements, _READ):
            found = bytearray(width * min(_READ, elements - start))
            source.read_into(tensor.offset + width * start, [memoryview(found)])
            found[width - 1 :: width] = found[width - 1 :: width].translate(_NO_SIGN)
            if any(found):
                place = next(at for at, byte in enumerate(found) if byte) // width
                return f"element {start + place} is not 0"
    return ""
