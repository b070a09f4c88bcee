"""What clients read: OpenAI's objects, whole and in chunks of a stream, and its errors."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from starlette.responses import Response

DONE = b"data: [DONE]\n\n"
_ENCODER = msgspec.json.Encoder()


class Usage(NamedTuple):
    """How many tokens a request's prompts have, each counted once, and its answers together."""

    prompt_tokens: int
    completion_tokens: int

    def to_dict(self) -> dict[str, int]:
        """OpenAI's object."""
        return {**self._asdict(), "total_tokens": sum(self)}


class Part(NamedTuple):
    """An answer, or more of one."""

    text: str
    token_ids: Sequence[int]
    finish_reason: str | None


class Reply:
    """The objects of one request, which share an id, a time and the model's name.

    `fingerprint` names what answers: the bundle's digest. `has_ids`: token ids stand beside the text. `has_usage`: a
    stream says at its end how many tokens there were; `counts_on`: in each of its chunks, too.
    """

    def __init__(
        self, *, is_chat: bool, model: str, fingerprint: str, has_ids: bool, has_usage: bool, counts_on: bool
    ) -> None:
        self._is_chat = is_chat
        self._has_ids = has_ids
        self._counts_on = counts_on
        self.has_usage = has_usage
        id = uuid.uuid4().hex
        self._common = {
            "id": f"chatcmpl-{id}" if is_chat else f"cmpl-{id}",
            "created": int(time.time()), "model": model, "system_fingerprint": fingerprint,
        }  # fmt: skip
        self._streamed = {**self._common, "object": "chat.completion.chunk" if is_chat else "text_completion"}
        if has_usage:
            self._streamed["usage"] = None

    def whole(self, answers: Sequence[Part], usage: Usage) -> bytes:
        """All answers."""
        choices = []
        for index, answer in enumerate(answers):
            said: dict[str, Any] = {"text": answer.text}
            if self._is_chat:
                said = {"message": {"role": "assistant", "content": answer.text, "refusal": None}}
            choices.append(self._choice(index, said, answer))
        kind = "chat.completion" if self._is_chat else "text_completion"
        return encoded({**self._common, "object": kind, "choices": choices, "usage": usage.to_dict()})

    def first(self, index: int, echo: str) -> bytes | None:
        """The chunk that begins an answer, if one does: that of a chat, or one with an echo in front."""
        if self._is_chat:
            return self._chunk(index, {"delta": {"role": "assistant", "content": "", "refusal": None}}, _NOTHING)
        return self._chunk(index, {"text": echo}, _NOTHING) if echo else None

    def more(self, index: int, part: Part, usage: Usage) -> bytes | None:
        """The chunk with more of an answer, if there is anything to say; `usage` is that so far."""
        if not part.text and part.finish_reason is None and not self._has_ids:
            return None
        delta = {"content": part.text} if part.text else {}
        return self._chunk(index, {"delta": delta} if self._is_chat else {"text": part.text}, part, usage)

    def usage(self, usage: Usage) -> bytes:
        """The chunk that says how many tokens there were."""
        return streamed({**self._streamed, "choices": [], "usage": usage.to_dict()})

    def _chunk(self, index: int, said: dict[str, Any], part: Part, usage: Usage | None = None) -> bytes:
        chunk = {**self._streamed, "choices": [self._choice(index, said, part)]}
        if self._counts_on and usage is not None:
            chunk["usage"] = usage.to_dict()
        return streamed(chunk)

    def _choice(self, index: int, said: dict[str, Any], part: Part) -> dict[str, Any]:
        choice = {"index": index, **said, "logprobs": None, "finish_reason": part.finish_reason}
        return choice | {"token_ids": part.token_ids} if self._has_ids else choice


_NOTHING = Part("", (), None)


def error(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's object of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def encoded(value: Any) -> bytes:
    """JSON."""
    return _ENCODER.encode(value)


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON as a whole response."""
    return Response(encoded(value), status, headers, media_type="application/json")


def streamed(value: Any) -> bytes:
    """JSON as an event of a stream (server-sent events)."""
    return b"data: " + _ENCODER.encode(value) + b"\n\n"
