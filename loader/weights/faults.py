"""Which tensor of a checkpoint isn't what it must be, and at which place: looked for tensor by tensor once a load has
found something, because only then anybody waits for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from precast.ir.errors import WeightsError
from precast.ir.weights.checkpoint import CheckpointFiles, StoredTensor
from precast.loader.weights.stored_checks import BITS, Check, are_bad

_READ_BYTES = 64 << 20
"""At a time: weights that are quantised while they are read are large."""


def refusal(check: Check, files: CheckpointFiles, stored: Mapping[str, StoredTensor]) -> WeightsError:
    """The error for a param that isn't what `check` asks, with the first of its tensors that isn't."""
    fix = "the checkpoint is damaged: download or copy it again"
    for name in check.tensors:
        tensor = stored[name]
        found = _first(check._replace(dtype=tensor.dtype), files, tensor)  # type: ignore[arg-type]
        if found is not None:
            place, value = found
            index = list(map(int, np.unravel_index(place, tensor.shape)))
            at = f" at {index}" if index else ""
            message = f"{name}: the {check.what}{at} is {value}, expected {check.expected}"
            return WeightsError("weights-mismatch", message, where=f"{files.folder.name}/{tensor.file}", fix=fix)
    message = f"{check.listed()}: a {check.what} is not {check.expected} in {check.dtype}"
    return WeightsError("weights-mismatch", message, where=files.folder.name, fix=fix)


def _first(check: Check, files: CheckpointFiles, tensor: StoredTensor) -> tuple[int, str] | None:
    """The place of the first number that is bad, and what it is."""
    held = np.dtype("int32" if check.num_groups is not None else BITS[check.dtype][0])
    with files.source(tensor.file) as source:
        for start in range(0, tensor.nbytes, _READ_BYTES):
            data = bytearray(min(_READ_BYTES, tensor.nbytes - start))
            source.read_into(tensor.offset + start, [memoryview(data)])
            bits = np.frombuffer(data, held)
            bad = np.flatnonzero(are_bad(bits, check))
            if len(bad):
                return start // held.itemsize + int(bad[0]), _shown(bits[bad[:1]], check)
    return None


def _shown(bits: Any, check: Check) -> str:
    """One number, by its bits; types that numpy doesn't have by their byte."""
    if check.num_groups is not None:
        return str(bits[0])
    if check.dtype == "bfloat16":
        return str((bits.astype(np.int32) << 16).view(np.float32)[0])
    return hex(bits[0]) if bits.itemsize == 1 else str(bits.view(check.dtype)[0])
