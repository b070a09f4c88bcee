"""Where the tensors of a step lie before its memory is known, and launches over them: what programs are made of."""

from __future__ import annotations

import math
from typing import NamedTuple

from precast.ir.graph import schema as ir
from precast.ir.memory.strides import Layout
from precast.ir.weights.tensorfile import element_bytes
from precast.kernels.records import Launch
from precast.loader.device import Dim3

ACTIVATIONS, WORKSPACE, OUTPUT = "<activations>", "<workspace>", "<output>"
"""Memory that values lie in beside params, caches and inputs, which have their names. The outputs' is `OUTPUT` and a
name."""
Number = int | float | None


class NotCoveredError(Exception):
    """What a graph needs that isn't a launch or a view: the op, and why. No error for users: it chooses a backend."""


class At(NamedTuple):
    """An address: byte `offset` of some memory."""

    base: str
    offset: int


class Placed(NamedTuple):
    """Where a value lies: from byte `offset` of some memory on, and how."""

    base: str
    offset: int
    dtype: ir.Dtype
    layout: Layout

    @property
    def num_bytes(self) -> int:
        """All of its elements."""
        return element_bytes(self.dtype) * math.prod(self.layout.shape)

    def at(self, later: int = 0) -> At:
        """Where it begins, or so many bytes later."""
        return At(self.base, self.offset + later)


class Template(NamedTuple):
    """A launch whose addresses are still those of names. `key` names its kernel (`precast.kernels.launch_key`)."""

    launch: Launch
    key: str
    grid: Dim3
    values: tuple[Number | At, ...]
