"""Text and chats as token ids, with what a user writes kept apart from what the template says.

Control tokens (`<|im_end|>`) that stand in a message are text, as the user means it: they can't end the message and
begin another one in the name of the system. So the template is rendered with marks in their place, and what lies
between the template's own control tokens is encoded as if there were none.

Control tokens are the tokenizer's special ones, and whatever else it adds that stands in the template, such as
`<think>`. An assistant's messages may have the latter: templates look for them there.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import tokenizers

from precast.ir.manifest import ModelInfo
from precast.loader.engine.prompts import token_ids_of
from precast.loader.engine.tokenizer import FILE_NAME, Tokenizer
from precast.serve.chat import ChatTemplate
from precast.serve.requests import BadRequest

_MARK = "\U000f0000"
"""On both sides of a mark's number. It is for private use; in a message it is marked itself."""


class Prompts:
    """The tokenizer of a bundle and its chat template, for one model. All of it may be called from any thread."""

    def __init__(self, files: Mapping[str, bytes], model: ModelInfo) -> None:
        """`files` are the bundle's tokenizer files. Raises BundleError for those that can't be read."""
        self._model = model
        self.tokenizer = Tokenizer.from_files(files)
        self._template = ChatTemplate.from_files(files)
        self._control = None
        if self.tokenizer is not None and self._template is not None:
            self._control = Control(files[FILE_NAME], self._template.text)

    def of_text(self, prompt: str | Sequence[int], *, add_special_tokens: bool = True) -> array[int]:
        """The token ids of a text, or these ids. Raises RequestError for what the model can't answer."""
        return token_ids_of(
            prompt, self._model, lambda: self.tokenizer, add_special_tokens=add_special_tokens, is_answered=True
        )

    def of_chat(self, messages: list[dict[str, Any]], variables: Mapping[str, Any], **options: bool) -> array[int]:
        """The token ids of a chat, as its template renders it. Raises BadRequest, and RequestError as `of_text`."""
        if self._control is None:
            if self.tokenizer is None:
                return self.of_text("")  # which says that there is none
            raise BadRequest("this model has no chat template; use /v1/completions", code="chat-template-missing")
        assert self._template is not None
        texts: list[str] = []
        try:
            marked = [self._control.marked_message(message, texts) for message in messages]
            variables = self._control.marked(dict(variables), texts)
        except RecursionError:
            raise BadRequest("the messages are nested too deep", param="messages") from None
        rendered = self._template.render(marked, variables, **options)
        if texts:
            return self.of_text(self._control.encode(rendered, texts))
        return self.of_text(rendered, add_special_tokens=False)


class Control:
    """The control tokens of a tokenizer and a template, and a tokenizer that takes them for text."""

    def __init__(self, file: bytes, template: str) -> None:
        """`file` is a tokenizer.json that the library reads."""
        found = msgspec.json.decode(file)
        added = found.get("added_tokens") or []
        self._special = [token["content"] for token in added if token.get("special")]
        for token in added:
            token["special"] = token.get("special") or token["content"] in template
        self._plain = tokenizers.Tokenizer.from_str(msgspec.json.encode(found).decode())
        self._plain.no_truncation()
        self._plain.no_padding()
        self._plain.encode_special_tokens = True
        tokens = [(token, id) for id, token in self._plain.get_added_tokens_decoder().items() if token.special]
        tokens.sort(key=lambda each: -len(each[0].content))  # of two that begin alike the longer one counts
        self._ids = {token.content: id for token, id in tokens}
        # Blanks beside a token belong to it where the tokenizer says so.
        patterns = [
            "\\s*" * token.lstrip + re.escape(token.content) + "\\s*" * token.rstrip for token, _ in tokens
        ]  # fmt: skip
        self._between = re.compile(f"({'|'.join(patterns)})") if patterns else None
        self._in_text = re.compile("|".join(map(re.escape, [*self._ids, _MARK])))
        self._in_answers = re.compile("|".join(map(re.escape, [*sorted(self._special, key=len)[::-1], _MARK])))

    def marked_message(self, message: dict[str, Any], texts: list[str]) -> dict[str, Any]:
        """The message with a mark in place of each control token; see `marked`."""
        is_answer = message.get("role") == "assistant"
        found: dict[str, Any] = _replaced(message, self._in_answers if is_answer else self._in_text, texts)
        return found

    def marked(self, value: Any, texts: list[str]) -> Any:
        """The value with a mark in place of each control token in its strings. The tokens are added to `texts`; a mark
        has the number of its own there."""
        return _replaced(value, self._in_text, texts)

    def encode(self, rendered: str, texts: list[str]) -> list[int]:
        """The ids of a rendered template: its own control tokens are such, and marks stand for these texts."""
        ids: list[int] = []
        pieces = self._between.split(rendered) if self._between else [rendered]
        for i, piece in enumerate(pieces):
            if i % 2:
                ids.append(self._ids[piece] if piece in self._ids else self._ids[piece.strip()])
            elif piece:
                text = re.sub(f"{_MARK}([0-9]+){_MARK}", lambda found: texts[int(found[1])], piece)
                ids += self._plain.encode(text, add_special_tokens=False).ids
        return ids


def _replaced(value: Any, pattern: re.Pattern[str], texts: list[str]) -> Any:
    """The value with a mark in place of what the pattern finds in its strings, and in its keys."""

    def mark(found: re.Match[str]) -> str:
        texts.append(found[0])
        return f"{_MARK}{len(texts) - 1}{_MARK}"

    if isinstance(value, str):
        return pattern.sub(mark, value)
    if isinstance(value, list):
        return [_replaced(each, pattern, texts) for each in value]
    if isinstance(value, dict):
        return {pattern.sub(mark, key): _replaced(each, pattern, texts) for key, each in value.items()}
    return value
