"""Text and chats as token ids, with what a user writes kept apart from what the template says.

Special tokens (`<|im_end|>`) that stand in a message are text, as the user means it: they can't end the message and
begin another one in the name of the system. So the template is rendered with marks in their place, and what lies
between the template's own special tokens is encoded as if there were none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import tokenizers

from precast.ir.errors import RequestError
from precast.loader.engine.tokenizer import FILE_NAME, Tokenizer
from precast.serve.chat import ChatTemplate
from precast.serve.requests import BadRequest

_MARK = "\U000f0000"
"""On both sides of a mark's number. It is for private use; in a message it is marked itself."""


class Prompts:
    """The tokenizer of a bundle and its chat template. All of it may be called from any thread."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """`files` are the bundle's tokenizer files. Raises BundleError for those that can't be read."""
        self._tokenizer = Tokenizer.from_files(files)
        self._template = ChatTemplate.from_files(files)
        self._special = _Special(files[FILE_NAME].decode()) if self._tokenizer else None

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises RequestError where the bundle has none."""
        if self._tokenizer is None:
            raise RequestError("tokenizer-missing", "this bundle has no tokenizer: give token ids to /v1/completions")
        return self._tokenizer

    def of_chat(self, messages: list[dict[str, Any]], variables: Mapping[str, Any], **options: bool) -> list[int]:
        """The token ids of a chat, as its template renders it. Raises BadRequest and RequestError."""
        tokenizer = self.tokenizer
        assert self._special is not None
        if self._template is None:
            raise BadRequest("this model has no chat template; use /v1/completions", code="chat-template-missing")
        texts: list[str] = []
        marked = self._special.marked({"messages": messages, "variables": dict(variables)}, texts)
        rendered = self._template.render(marked["messages"], marked["variables"], **options)
        if texts:
            return self._special.encode(rendered, texts)
        return tokenizer.encode(rendered, add_special_tokens=False)


class _Special:
    """The special tokens of a tokenizer, and a tokenizer that takes them for text."""

    def __init__(self, text: str) -> None:
        self._plain = tokenizers.Tokenizer.from_str(text)
        self._plain.no_truncation()
        self._plain.no_padding()
        self._plain.encode_special_tokens = True
        found = [(token, id) for id, token in self._plain.get_added_tokens_decoder().items() if token.special]
        found.sort(key=lambda each: -len(each[0].content))  # of two that begin alike the longer one counts
        self._ids = {token.content: id for token, id in found}
        # Blanks beside a token belong to it where the tokenizer says so.
        patterns = [
            "\\s*" * token.lstrip + re.escape(token.content) + "\\s*" * token.rstrip for token, _ in found
        ]  # fmt: skip
        self._between = re.compile(f"({'|'.join(patterns)})") if patterns else None
        self._in_text = re.compile("|".join(map(re.escape, [*self._ids, _MARK])))

    def marked(self, value: Any, texts: list[str]) -> Any:
        """The value with a mark in place of each special token in its strings. The tokens are added to `texts`; a mark
        has the number of its own there."""
        if isinstance(value, str):
            return self._in_text.sub(lambda found: _marked(found[0], texts), value)
        if isinstance(value, list):
            return [self.marked(each, texts) for each in value]
        if isinstance(value, dict):
            return {key: self.marked(each, texts) for key, each in value.items()}
        return value

    def encode(self, rendered: str, texts: list[str]) -> list[int]:
        """The ids of a rendered template: its own special tokens are such, and marks stand for these texts."""
        ids: list[int] = []
        pieces = self._between.split(rendered) if self._between else [rendered]
        for i, piece in enumerate(pieces):
            if i % 2:
                ids.append(self._ids[piece] if piece in self._ids else self._ids[piece.strip()])
            elif piece:
                text = re.sub(f"{_MARK}([0-9]+){_MARK}", lambda found: texts[int(found[1])], piece)
                ids += self._plain.encode(text, add_special_tokens=False).ids
        return ids


def _marked(text: str, texts: list[str]) -> str:
    texts.append(text)
    return f"{_MARK}{len(texts) - 1}{_MARK}"
