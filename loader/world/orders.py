"""What rank 0 orders all ranks to do, as bytes: a fixed head, three tables of integers, and the step's inputs.

    head        version[1] kind[1] has_unknown[1] wants_logits[1] num_rows[4] num_tokens[8] copies[4] lengths[4]
                parts[4] pad[4]
    copies      group, source, target: int32[copies, 3], in the order in which they are made
    lengths     of each array, by the names in order, -1 of one that isn't there: int64[lengths]
    parts       where the bytes of each lie in the places, and how many: int64[parts, 2]
    bytes       of all parts, one after another

All in the order of bytes of the machine: ranks agree on it before the first order (`precast.loader.world.agree`).
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from precast.ir.errors import TargetError
from precast.loader.cache.spans import PageCopy

VERSION = 2
MAX_COPIES = 1 << 16
"""Pages that one step saves or restores: some for each sequence."""

_HEAD = struct.Struct("=BBBBIqIII4x")


class Kind(enum.IntEnum):
    """What is ordered."""

    STEP = 1
    CAPTURE = 2
    COPIES = 3


class Part(NamedTuple):
    """Bytes for the places of a step's inputs, from byte `start` on."""

    start: int
    data: memoryview


class Order(NamedTuple):
    """One order. A step copies pages first; then its inputs are in their places, and the program runs on them.

    `num_tokens` of a captured size, or 0: op by op. Then `lengths` say how long each array is, `num_rows` how many rows
    draw a token, and `has_unknown` whether tokens that were drawn last are among its inputs. `wants_logits`: rank 0
    wants logits in the place of tokens, and the last stage sends them.
    """

    kind: Kind
    copies: Sequence[PageCopy] = ()
    num_tokens: int = 0
    lengths: Mapping[str, int] = {}
    num_rows: int = 0
    has_unknown: bool = False
    wants_logits: bool = False


class Orders:
    """Writes orders, and reads them: for a step's arrays of these names, and groups of pages of these names."""

    def __init__(self, arrays: Iterable[str], groups: Iterable[str], places_bytes: int) -> None:
        self._arrays = sorted(arrays)
        self._groups = sorted(groups)
        self._index = {name: i for i, name in enumerate(self._groups)}
        self._places_bytes = places_bytes

    @property
    def max_bytes(self) -> int:
        """The longest order."""
        return _HEAD.size + 12 * MAX_COPIES + 24 * len(self._arrays) + self._places_bytes

    def encode(self, order: Order, parts: Sequence[Part] = ()) -> list[bytes | memoryview]:
        """The order's bytes, in pieces. `parts`: the inputs of a step."""
        assert len(order.copies) <= MAX_COPIES, f"{len(order.copies)} pages are copied in one step"
        lengths = [order.lengths.get(name, -1) for name in self._arrays] if order.lengths else []
        head = _HEAD.pack(
            VERSION, order.kind, order.has_unknown, order.wants_logits, order.num_rows, order.num_tokens,
            len(order.copies), len(lengths), len(parts),
        )  # fmt: skip
        copies = [(self._index[copy.group], copy.source, copy.target) for copy in order.copies]
        tables = (np.array(copies, np.int32), np.array(lengths, np.int64),
                  np.array([(part.start, len(part.data)) for part in parts], np.int64))  # fmt: skip
        return [head, *(table.tobytes() for table in tables), *(part.data for part in parts)]

    def max_bytes_of_each(self, count: int) -> int:
        """The longest of `encode_each`, for so many followers."""
        return count * (8 + self.max_bytes)

    def encode_each(self, orders: Sequence[Sequence[bytes | memoryview]]) -> list[bytes | memoryview]:
        """Several orders, one for each follower, as one: how long each is, int64[followers], and all of them."""
        lengths = np.array([sum(map(len, order)) for order in orders], np.int64)
        return [lengths.tobytes(), *(part for order in orders for part in order)]

    def decode_own(self, raw: memoryview, follower: int, count: int) -> tuple[Order, list[Part]]:
        """As `decode`, of the order for one of `count` followers, counted from 0."""
        lengths = np.frombuffer(raw[: 8 * count], np.int64).tolist() if len(raw) >= 8 * count else []
        if len(lengths) != count or min(lengths) < 0 or 8 * count + sum(lengths) != len(raw):
            found = f"rank 0 sent {len(raw)} bytes that are no orders for {count} ranks"
            raise TargetError("ranks-differ", found, fix="run the same release of precast on all ranks")
        start = 8 * count + sum(lengths[:follower])
        return self.decode(raw[start : start + lengths[follower]])

    def decode(self, raw: memoryview) -> tuple[Order, list[Part]]:
        """The order that these bytes are, and the inputs, which lie in `raw`.

        Raises TargetError (ranks-differ) for bytes that no order of this world has.
        """
        try:
            return self._decode(raw)
        except (struct.error, ValueError, IndexError) as error:
            found = f"rank 0 sent an order of {len(raw)} bytes that is none: {error}"
            raise TargetError("ranks-differ", found, fix="run the same release of precast on all ranks") from None

    def _decode(self, raw: memoryview) -> tuple[Order, list[Part]]:
        version, kind, has_unknown, wants_logits, num_rows, num_tokens, *counts = _HEAD.unpack_from(raw)
        num_copies, num_lengths, num_parts = counts
        if version != VERSION:
            raise ValueError(f"version {version}")
        if num_lengths not in (0, len(self._arrays)) or num_copies > MAX_COPIES or num_parts > len(self._arrays):
            raise ValueError(f"{num_copies} copies, {num_lengths} lengths, {num_parts} parts")
        at = _HEAD.size
        copies = np.frombuffer(raw, np.int32, 3 * num_copies, at).reshape(-1, 3)
        at += copies.nbytes
        lengths = np.frombuffer(raw[at:], np.int64, num_lengths)
        at += lengths.nbytes
        extents = np.frombuffer(raw[at:], np.int64, 2 * num_parts).reshape(-1, 2)
        at += extents.nbytes
        parts = []
        for start, length in extents.tolist():
            if not 0 <= start <= start + length <= self._places_bytes:
                raise ValueError(f"bytes {start} to {start + length} of {self._places_bytes}")
            parts.append(Part(start, raw[at : at + length]))
            at += length
        if at != len(raw):
            raise ValueError(f"expected {at} bytes")
        if num_copies and not 0 <= int(copies[:, 0].min()) <= int(copies[:, 0].max()) < len(self._groups):
            raise ValueError(f"copies of pages of {len(self._groups)} groups")
        order = Order(
            Kind(kind),
            [PageCopy(self._groups[group], source, target) for group, source, target in copies.tolist()],
            num_tokens,
            {name: length for name, length in zip(self._arrays, lengths.tolist(), strict=False) if length >= 0},
            num_rows,
            bool(has_unknown),
            bool(wants_logits),
        )
        return order, parts
