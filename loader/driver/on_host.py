"""What numpy makes on the host of a checkpoint's tensors, and brings to the device: params that are transposed, of
short rows, or of another element type than their tensors; a bundle's constants.

Most models have none: numpy is imported with this module, and that is not before it is needed.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from precast.ir.graph.schema import Dtype, Graph
from precast.ir.memory.strides import contiguous
from precast.ir.weights.checkpoint import StoredDtype
from precast.loader.device import Buffer
from precast.loader.driver import library
from precast.loader.driver.device import DriverDevice
from precast.loader.driver.param_plan import Made, Planned, target_bytes
from precast.loader.weights.parts import Casts
from precast.loader.weights.read_plan import Copy, Job, Plan
from precast.loader.weights.repacked import repacked
from precast.loader.weights.stored_checks import BITS, Check, Fault, are_bad
from precast.loader.weights.views import View

if TYPE_CHECKING:
    import numpy.typing as npt

_NUMPY: Mapping[str, str] = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "F8_E8M0": "uint8"}
"""What holds the elements of types that numpy doesn't have."""
_POWERS = np.array([*(math.ldexp(1, exponent - 127) for exponent in range(255)), math.nan], np.float32)
"""What each byte of F8_E8M0 stands for."""


class OnHost:
    """Targets that are made on the host. Each has memory from its first byte on, until its last one is made and it is
    uploaded; temporary ones, and those that take parts of these, until all is read.

    `at`: where targets lie on the device.
    """

    def __init__(self, what: Planned, at: Mapping[int, int]) -> None:
        self._plan, self._at, self._checks = what.plan, at, what.checks
        self.targets = what.on_host
        self._made: dict[int, npt.NDArray[np.uint8]] = {}
        self._lock = threading.Lock()
        self._left = Counter(target for job in what.plan.jobs for target in self._of(job))
        self._kept = {target for move in what.plan.moves for target in (move.source, move.target)}

    def __getitem__(self, target: int) -> npt.NDArray[np.uint8]:
        """A target's bytes."""
        with self._lock:
            if target not in self._made:
                self._made[target] = np.empty(target_bytes(self._plan.targets[target]), np.uint8)
            return self._made[target]

    def done(self, job: Job, stream: int | None) -> None:
        """The job has put in what it makes: targets for which it was the last go to the device, and are gone."""
        for target in self._of(job):
            with self._lock:
                self._left[target] -= 1
                is_whole = not self._left[target] and target not in self._kept
            if is_whole:
                self._upload(target, stream)

    def move_all(self) -> None:
        """Move what is in temporary targets to where it belongs, in the plan's order, and upload that."""
        move_all(self._plan, self)
        for target in sorted(self._kept & self._at.keys()):
            self._upload(target, None)

    def _of(self, job: Job) -> set[int]:
        made = {copy.target for copy in job.copies} | {each.target for each in job.ranges if each.target is not None}
        return made & self.targets

    def _upload(self, target: int, stream: int | None) -> None:
        data = self[target]
        check_bytes(self._checks, target, data.data)
        upload(self._at[target], data, stream)
        library.call("cuStreamSynchronize", stream)
        with self._lock:
            del self._made[target]


def move_all(plan: Plan, made: Made) -> None:
    """Move what is in temporary targets to where it belongs, in the plan's order; both are on the host."""
    for move in plan.moves:
        dtype = plan.targets[move.source].dtype
        put(_strided(_seen(made[move.source], dtype), move.view), dtype, made[move.target], move.destination, ())


def constants(graph: Graph, given: Mapping[str, Any], device: DriverDevice) -> dict[str, Buffer]:
    """A bundle's constants by name, on the device. They have the types that the graph declares."""
    found = {}
    for value in graph.constants:
        dtype, shape, data = given[value.name]
        memory = device.alloc(max(len(data), 1))
        with device.use():
            upload(memory.pointer, np.frombuffer(data, np.uint8), None)
            library.call("cuStreamSynchronize", None)
        found[value.name] = memory.view(0, tuple(shape), strides=contiguous(shape).strides, dtype=dtype)
    return found


def upload(address: int, data: npt.NDArray[np.uint8], stream: int | None) -> None:
    """Copy bytes of the host to the device; what they are may change only when the stream's work is done."""
    if len(data):
        library.call("cuMemcpyAsync", address, data.ctypes.data, len(data), stream)


def check_bytes(checked: Mapping[int, Check], target: int, content: memoryview) -> None:
    """Raise Fault where some bytes of a target, whole elements, aren't what they must be."""
    check = checked.get(target)
    if check is None:
        return
    held = "int32" if check.num_groups is not None else BITS[check.dtype][0]
    if are_bad(np.frombuffer(content, np.uint8).view(held), check).any():
        raise Fault(check)


def check_copy(checked: Mapping[int, Check], copy: Copy, staged: memoryview) -> None:
    """As `check_bytes`, of what a job has staged for a copy on the device."""
    if copy.target in checked:
        check_bytes(checked, copy.target, np.ascontiguousarray(_staged(copy, staged)).reshape(-1).view(np.uint8).data)


def put_copy(copy: Copy, staged: memoryview, made: Made) -> None:
    """Put what a job has staged into a target."""
    values = _staged(copy, staged)
    if copy.repack is not None:
        values = repacked(np.array(values, order="C"), copy.repack)
    put(values, copy.dtype, made[copy.target], copy.destination, copy.casts)


def _staged(copy: Copy, staged: memoryview) -> npt.NDArray[Any]:
    flat = _seen(np.frombuffer(staged, np.uint8), copy.dtype)
    return _strided(flat, copy.source._replace(offset=copy.offset // flat.itemsize + copy.source.offset))


def put(
    values: npt.NDArray[Any], dtype: StoredDtype, raw: npt.NDArray[np.uint8], destination: View, casts: Casts
) -> None:
    """Put elements, converted to each type of `casts` in turn, into a view of the target whose bytes are `raw`."""
    for cast in casts:
        values, dtype = converted(values, dtype, cast), cast
    np.copyto(_strided(_seen(raw, dtype), destination), values)


def converted(values: npt.NDArray[Any], dtype: StoredDtype, to: Dtype) -> npt.NDArray[Any]:
    """Numbers of one floating type as those of another, rounded to the nearest, ties to even, as torch does.

    bfloat16 is held in uint16: the upper half of the float32 that has the same value; F8_E8M0 in uint8.
    """
    if dtype == to:
        return values
    if dtype == "F8_E8M0":
        values = _POWERS[values]
    elif dtype == "bfloat16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    if to != "bfloat16":
        with np.errstate(all="ignore"):  # infinities and NaN stay what they are
            return values.astype(to)
    with np.errstate(all="ignore"):
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(is_nan, np.uint32(0x7FC0), rounded).astype(np.uint16)


def _seen(raw: npt.NDArray[np.uint8], dtype: StoredDtype) -> npt.NDArray[Any]:
    """Bytes as elements of a type; those at the end that make no whole one are left out."""
    held = np.dtype(_NUMPY.get(dtype, dtype))
    return raw[: len(raw) // held.itemsize * held.itemsize].view(held)


def _strided(flat: npt.NDArray[Any], view: View) -> npt.NDArray[Any]:
    steps = [stride * flat.itemsize for stride in view.strides]
    return np.lib.stride_tricks.as_strided(flat[view.offset :], view.shape, steps)
