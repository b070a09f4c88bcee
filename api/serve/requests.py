"""Bodies of requests: what they may say, and what it means to the engine.

A field that is not known is refused by name, and so is one that is known and asks for what the engine doesn't do: an
answer that silently isn't what was asked for is worse than none. Where such a field says nothing (`n` 1, a penalty of
0, null), it is taken. Fields that are about the client's own books (`user`, `metadata`) are taken and left unread.
"""

from __future__ import annotations

import contextlib
import re
from typing import Annotated, Any, TypeVar

import msgspec

from precast.ir.errors import RequestError
from precast.loader.engine.params import SamplingParams

MOST_ANSWERS = 128
"""To one request: prompts times `n`."""
DEFAULT_COMPLETION_TOKENS = 16
"""What OpenAI's completions answer where nothing is said of `max_tokens`."""


class BadRequest(Exception):
    """A request that is refused as OpenAI's server does it: a message, and the field that it is about."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.code = code


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`include_usage`: a last chunk says how many tokens there were; `continuous_usage_stats`: each does.
    `include_obfuscation` is taken, and not done.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message's content."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """One message. Fields that are not listed reach the template as they are."""

    role: str
    content: str | list[ContentPart] | None = None


_Count = Annotated[int, msgspec.Meta(ge=1)]
_Text = Annotated[str, msgspec.Meta(max_length=1024)]
_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class _Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What completions and chats have in common."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: _Text | Annotated[list[_Text], msgspec.Meta(max_length=16)] | None = None
    n: _Count | None = None
    ignore_eos: bool | None = None
    priority: _Int64 | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    # What the engine doesn't do: see `_MEANS_NOTHING`.
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: Any = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    stop_token_ids: list[int] | None = None
    # The client's own books.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    request_id: Any = None

    def sampling(self, defaults: dict[str, Any], max_tokens: int | None) -> SamplingParams:
        """How an answer is drawn: as the request says, else by the model's own defaults. Raises BadRequest."""
        said = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos")}
        found = defaults | {name: value for name, value in said.items() if value is not None}
        try:
            return SamplingParams(max_tokens=max_tokens, stop=self.stop, **found)
        except RequestError as error:
            raise self._refused(error) from None

    def _refused(self, error: RequestError) -> BadRequest:
        """What SamplingParams refuses: it begins with the option, and has Python's word for null."""
        param = error.message.partition(" is ")[0]
        if param == "max_tokens" and getattr(self, "max_completion_tokens", None) is not None:
            param = "max_completion_tokens"
        said = error.message.partition(" is ")[2].replace("None", "null")
        return BadRequest(f"{param} is {said}", param=param, code=error.code)


class CompletionRequest(_Request, frozen=True, kw_only=True):
    """The body of `POST /v1/completions`. `prompt`: text, token ids, or a list of either."""

    prompt: str | list[Any]
    echo: bool | None = None
    add_special_tokens: bool | None = None
    best_of: int | None = None
    logprobs: int | None = None
    suffix: str | None = None

    def prompts(self) -> list[str | list[int]]:
        """All prompts. Raises BadRequest for anything else."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt:
            if type(self.prompt[0]) is not int and len(self.prompt) > MOST_ANSWERS:
                raise BadRequest(f"{len(self.prompt)} prompts, expected at most {MOST_ANSWERS}", param="prompt")
            with contextlib.suppress(msgspec.ValidationError):
                return [msgspec.convert(self.prompt, list[_Int64])]
            with contextlib.suppress(msgspec.ValidationError):
                return msgspec.convert(self.prompt, list[str | list[_Int64]])
        raise BadRequest("prompt is none of text, a list of texts, token ids, and a list of these", param="prompt")

    def most_tokens(self) -> int | None:
        """The longest answer, in tokens."""
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens


class ChatRequest(_Request, frozen=True, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    # What the engine doesn't do.
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    verbosity: str | None = None
    # What means nothing without tools.
    parallel_tool_calls: bool | None = None

    def most_tokens(self) -> int | None:
        """The longest answer, in tokens; None: as long as the model's limit allows."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /tokenize`: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[int]


_MEANS_NOTHING: dict[str, tuple[Any, ...]] = {
    # field: the values by which it asks for nothing, beside null
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "best_of": (1,),
    "suffix": ("",),
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "continue_final_message": (False,),
    "verbosity": ("medium",),
    "logprobs": (False,),
    "top_logprobs": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}
"""What is known and not done."""
_MEANS_NOTHING_IN_CHATS = {"echo": (False,), "add_special_tokens": (False,)}
"""What only completions have."""
_PLACE = re.compile(r" - at `\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")
R = TypeVar("R")


def read_body(body: bytes, kind: type[R]) -> R:
    """The body as a request of this kind. Raises BadRequest."""
    try:
        request = _decoded(body, kind)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error), param=_param(str(error))) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    more = _MEANS_NOTHING_IN_CHATS if isinstance(request, ChatRequest) else {}
    for name, nothing in (_MEANS_NOTHING | more).items():
        value = getattr(request, name, None)
        if value is not None and not any(_equal(value, each) for each in nothing):
            raise BadRequest(f"{name} is not supported; leave it out", param=name, code="unsupported_parameter")
    return request


def _decoded(body: bytes, kind: type[R]) -> R:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        if not _UNKNOWN.search(str(error)):
            raise
    given = msgspec.json.decode(body)  # what is null says nothing, whatever it is called
    return msgspec.convert({name: value for name, value in given.items() if value is not None}, kind)


_SAYS_SOMETHING = ("user", "system", "developer")
"""Roles whose messages are nothing without content; others may call tools."""


def checked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with their text joined, as templates want them. Raises BadRequest for what is none."""
    if not messages:
        raise BadRequest("messages is empty, expected at least one", param="messages")
    found = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        try:
            said = msgspec.convert(message, ChatMessage)
        except msgspec.ValidationError as error:
            raise BadRequest(f"{where}: {error}", param=where) from None
        content = said.content
        if content is None and said.role in _SAYS_SOMETHING:
            raise BadRequest(f"{where}: a message of role {said.role} has no content, expected text", param=where)
        if isinstance(content, list):
            for part in content:
                if part.type != "text" or part.text is None:
                    shown = f"{where}: content of type {part.type[:64]!r} is not supported, expected text"
                    raise BadRequest(shown, param=where)
            content = "\n".join(part.text or "" for part in content)
        found.append({**message, "content": content or ""})
    return found


def refused(error: RequestError, *, is_chat: bool) -> BadRequest:
    """The engine's refusal as the client gets it: of a prompt, which in a chat is made of the messages."""
    fix = f"; {error.fix}" if error.fix else ""
    code = "context_length_exceeded" if error.code.startswith("prompt-too") else error.code
    is_prompts = error.code.startswith("prompt-") or error.code == "token-out-of-range"
    param = ("messages" if is_chat else "prompt") if is_prompts else None
    return BadRequest(f"{error.message}{fix}", param=param, code=code)


def _equal(value: Any, other: Any) -> bool:
    """Whether they are equal; to Python, False equals 0."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _param(message: str) -> str | None:
    """The field that a message of msgspec is about."""
    named = _UNKNOWN.search(message) or _MISSING.search(message)
    place = _PLACE.search(message)
    parts = [place[1] if place else "", named[1] if named else ""]
    return ".".join(part for part in parts if part) or None
