"""Launches through the driver: all that a launch says is written once, where the driver reads it, and launched as often
as wanted."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache

from precast.loader.driver import library
from precast.loader.driver.library import Config, LaunchAttribute

_MASK = 2**64 - 1


class Prepared:
    """One launch of a kernel: where it runs and with which arguments is fixed.

    `values` are the kernel's parameters in order: integers and addresses as 64 bits, of which a parameter takes as many
    as it has; floats as float32, None as a null pointer. `pdl`: it may begin before the kernel in front has ended.
    """

    __slots__ = ("_address", "_arguments", "_config", "_function", "_places", "_values")

    def __init__(
        self,
        function: int,
        grid: Sequence[int],
        block: Sequence[int],
        shared_bytes: int,
        values: Sequence[int | float | None],
        *,
        pdl: bool = False,
    ) -> None:
        count = len(values)
        self._values = (ctypes.c_uint64 * count)(*map(_bits, values))
        first = ctypes.addressof(self._values)
        self._places = (ctypes.c_void_p * count)(*range(first, first + 8 * count, 8))
        self._config = config = Config((ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block), shared_bytes)
        if pdl:
            config.attributes, config.num_attributes = ctypes.addressof(_overlap()), 1
        self._function = function
        self._address, self._arguments = ctypes.addressof(config), ctypes.addressof(self._places)

    def launch(self, stream: int) -> None:
        """Launch it on a stream, captured or not."""
        self._config.stream = stream
        status = library.function("cuLaunchKernelEx")(self._address, self._function, self._arguments, None)
        if status:
            raise library.DriverError(status, "cuLaunchKernelEx")


def _bits(value: int | float | None) -> int:
    """A parameter as the 8 bytes from which the driver takes as many as it has."""
    if isinstance(value, float):
        return int.from_bytes(struct.pack("<f", value), "little")
    return 0 if value is None else value & _MASK


@cache
def _overlap() -> LaunchAttribute:
    """Programmatic dependent launch."""
    return LaunchAttribute(id=library.LAUNCH_OVERLAPS, value=1)
