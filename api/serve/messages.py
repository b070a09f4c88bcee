"""What the two processes say to each other: small structs of fixed types, as msgpack behind their length."""

from __future__ import annotations

import struct
from typing import Any, Self

import msgspec

from precast.ir import errors
from precast.ir.errors import PrecastError, TargetError
from precast.ir.manifest import ModelInfo
from precast.loader.engine.results import Failure, FinishReason

LENGTH = struct.Struct(">I")
"""In front of each message: how many bytes it has."""


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The root of all messages."""


# --- to the engine ---------------------------------------------------------------------------------------------------


class Load(Message, frozen=True):
    """The first message: what to load. `options` are keywords of `precast.load`, paths as text."""

    bundle: str
    trust: str | None
    options: dict[str, Any]


class Ask(Message, frozen=True):
    """A request: token ids, and the fields of SamplingParams. `number` is the sender's; others name it by that."""

    number: int
    prompt: list[int]
    params: dict[str, Any]
    priority: int = 0


class Cancel(Message, frozen=True):
    """Nobody waits for this answer any more. Of one that has ended it says nothing."""

    number: int


class Count(Message, frozen=True):
    """`Counted` is wanted."""


class End(Message, frozen=True):
    """The engine is not needed any more: it is closed, and its process ends."""


# --- from the engine -------------------------------------------------------------------------------------------------


class Phase(Message, frozen=True):
    """What the load does now."""

    name: str


class Opened(Message, frozen=True):
    """The bundle is whole and trusted: its digest, what it says of the model, its tokenizer's files."""

    digest: str
    model: ModelInfo
    files: dict[str, bytes]


class Ready(Message, frozen=True):
    """The engine answers from here on; `seconds` is what the load took."""

    seconds: float


class Taken(Message, frozen=True):
    """The request can be answered, and is queued."""

    number: int


class Refused(Message, frozen=True):
    """The request can't be answered, and nothing comes of it: the fields of a RequestError."""

    number: int
    code: str
    message: str
    where: str | None
    fix: str | None

    def error(self) -> errors.RequestError:
        """The same as an error to raise."""
        return errors.RequestError(self.code, self.message, where=self.where, fix=self.fix)


class Told(msgspec.Struct, frozen=True, array_like=True):
    """News of one answer: an `Event` of the engine under the sender's number."""

    number: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    error: Failure | None


class News(Message, frozen=True):
    """What a step brought; nothing, after steps that took long: the engine is at work."""

    told: list[Told]


class Counted(Message, frozen=True):
    """`engine.metrics()`, and of it what fleets scale by.

    `cache_usage`, 0 to 1: what share of its pages the fullest pool holds for requests, and not for reuse alone.
    """

    text: str
    waiting: int
    running: int
    cache_usage: float


class Failed(Message, frozen=True):
    """The engine has failed and its process ends: the fields of a PrecastError, and the name of its class."""

    kind: str
    code: str
    message: str
    where: str | None = None
    fix: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """The failure with this error; one that isn't Precast's own is told in a line."""
        return cls(*errors.told(error, "engine-failed"))

    def error(self) -> PrecastError:
        """The same as an error to raise."""
        kind: type[PrecastError] = getattr(errors, self.kind, TargetError)
        return kind(self.code, self.message, where=self.where, fix=self.fix)


ToEngine = Load | Ask | Cancel | Count | End
FromEngine = Phase | Opened | Ready | Taken | Refused | News | Counted | Failed
_ENCODER = msgspec.msgpack.Encoder()


def framed(message: Message) -> bytes:
    """The message as it is sent."""
    body = _ENCODER.encode(message)
    return LENGTH.pack(len(body)) + body
