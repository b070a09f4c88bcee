"""What ranks say to each other beside the orders of steps: few, small messages of fixed types, as msgpack."""

from __future__ import annotations

from typing import Self

import msgspec

from precast.ir import errors
from precast.ir.errors import PrecastError, TargetError

MAX_MESSAGE_BYTES = 4 << 20
"""Facts and a timeline of each of a thousand ranks take less."""


class Here(msgspec.Struct, frozen=True, tag="here", forbid_unknown_fields=True):
    """A rank has come to the end of a phase, with what it has to say there."""

    phase: str
    value: bytes


class Together(msgspec.Struct, frozen=True, tag="together", forbid_unknown_fields=True):
    """All ranks have come to the end of a phase: what each has said, by rank."""

    phase: str
    values: tuple[bytes, ...]


class Failed(msgspec.Struct, frozen=True, tag="failed", forbid_unknown_fields=True):
    """A rank has failed, and all end: the fields of its `PrecastError`, and the name of that class."""

    rank: int
    kind: str
    code: str
    message: str
    where: str | None = None
    fix: str | None = None

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Self:
        """The failure of `rank` with this error; one that isn't Precast's own is told in a line."""
        return cls(rank, *errors.told(error, "rank-failed"))

    def error(self) -> PrecastError:
        """The same as an error to raise; its place begins with the rank."""
        kind = getattr(errors, self.kind, None)
        if not isinstance(kind, type) or not issubclass(kind, PrecastError) or self.code not in errors.CODES:
            return TargetError("rank-failed", f"{self.kind} {self.code}: {self.message}", where=f"rank {self.rank}")
        error: PrecastError = kind(self.code, self.message, where=self.where, fix=self.fix)
        return error if self.code in _OF_ALL else error.inside(f"rank {self.rank}")


_OF_ALL = frozenset(("rank-lost", "rank-missing", "ranks-differ", "rank-late"))
"""Errors that name the ranks they are about."""


class End(msgspec.Struct, frozen=True, tag="end", forbid_unknown_fields=True):
    """Rank 0 needs its followers no more."""


class OrdersAt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where rank 0 writes orders for processes of its host: the fields of a `RingPlace`; no path: nowhere."""

    path: str = ""
    magic: bytes = b""
    num_bytes: int = 0


class ReadsOrders(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether a rank has found them there."""

    is_attached: bool


Message = Here | Together | Failed | End

_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """The message as bytes."""
    return msgspec.msgpack.encode(message)


def decode(raw: bytes) -> Message:
    """The message of these bytes. Raises TargetError (ranks-differ) for any other bytes."""
    try:
        return _DECODER.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        found = f"a rank sent a message that this one doesn't know: {error}"
        raise TargetError("ranks-differ", found, fix="run the same release of precast on all ranks") from None
