"""What the CUDA driver is told of a launch, read from memory as it reads it itself: no driver is needed."""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple


class Launched(NamedTuple):
    """What one launch said: as many arguments of 8 bytes as the kernel has, as unsigned numbers."""

    function: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    stream: int
    attributes: list[tuple[int, int]]
    args: list[int]


class Driver:
    """Notes launches of kernels with `num_args` arguments; `status` is what it answers."""

    def __init__(self) -> None:
        self.num_args, self.status = 0, 0
        self.launches: list[Launched] = []

    def launch(self, config: int, function: int, args: int, extra: object) -> int:
        """As `cuLaunchKernelEx`, whose structures are laid out as in cuda.h."""
        *sizes, stream, attributes, count = struct.unpack("7IxxxxQQI", ctypes.string_at(config, 52))
        # An attribute has 72 bytes: what it is, and behind 8 bytes its value.
        found = [struct.unpack("IxxxxI", ctypes.string_at(attributes + 72 * i, 12)) for i in range(count)]
        places = (ctypes.c_uint64 * self.num_args).from_address(args)
        values = [ctypes.c_uint64.from_address(place).value for place in places]
        self.launches.append(Launched(function, tuple(sizes[:3]), tuple(sizes[3:6]), sizes[6], stream, found, values))
        return self.status
