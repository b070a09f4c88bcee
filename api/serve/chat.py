"""Chats as prompts: the model's own template, rendered as transformers renders it.

The template comes from the bundle alone, never from a request. It is a program of strangers all the same: it runs in
jinja's sandbox, in which it reaches nothing but the messages.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils
import msgspec

from precast.ir.errors import BundleError
from precast.serve.requests import BadRequest

_OWN = frozenset(("messages", "chat_template", "tools", "documents", "tokenize", "add_generation_prompt"))
"""What `chat_template_kwargs` may not give."""
_AMISS = (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)
"""What templates raise at messages that they don't expect."""
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """A model's chat template."""

    def __init__(self, text: str, variables: Mapping[str, Any]) -> None:
        """`variables`: what the template finds beside the messages, such as `bos_token`.

        Raises BundleError for text that is no template.
        """
        try:
            self._template = _environment().from_string(text)
        except jinja2.TemplateError as error:
            raise BundleError("tokenizer-invalid", f"the chat template can't be read: {error}") from error
        self._variables = variables
        self.text = text

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> ChatTemplate | None:
        """The template among a bundle's tokenizer files, or None. Raises BundleError for files that can't be read."""
        config = _object(files, "tokenizer_config.json")
        text = _template_text(files, config)
        if text is None:
            return None
        tokens = _object(files, "special_tokens_map.json") | config
        return cls(text, {name: _content(tokens[name]) for name in _TOKENS if tokens.get(name) is not None})

    def render(
        self, messages: list[dict[str, Any]], variables: Mapping[str, Any], *, add_generation_prompt: bool = True
    ) -> str:
        """The prompt's text. Raises BadRequest where the template refuses the messages, or fails at them."""
        for name in variables.keys() & _OWN:
            raise BadRequest(f"chat_template_kwargs may not have {name!r}", param="chat_template_kwargs")
        given = {**self._variables, "tools": None, "documents": None, **variables}
        try:
            return self._template.render(
                messages=[_reasoned(message) for message in messages],
                add_generation_prompt=add_generation_prompt, **given,
            )  # fmt: skip
        except jinja2.TemplateError as error:
            raise BadRequest(f"the chat template refuses these messages: {error}", param="messages") from None
        except _AMISS as error:
            said = f"the chat template fails at these messages: {type(error).__name__}: {error}"
            raise BadRequest(said, param="messages") from None


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant says, for training; here it is nothing."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """What stands inside; what is set there ends with it."""
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """A namespace without names that begin with an underscore, by which templates have left the sandbox."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace may not have {name!r}")
        super().__setitem__(name, value)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """What templates of transformers expect: its options, its filter `tojson`, its two functions."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": strftime_now, "namespace": _Namespace}
    return environment


def _reasoned(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under the names that templates read, whatever the client calls it."""
    names = ("reasoning_content", "thinking", "reasoning")
    found = next((message[name] for name in names if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _template_text(files: Mapping[str, bytes], config: dict[str, Any]) -> str | None:
    """The template's text, from where transformers finds it: a file of its own comes first. Of several in the config
    it is the one called `default`."""
    if "chat_template.jinja" in files:
        try:
            return files["chat_template.jinja"].decode()
        except UnicodeDecodeError as error:
            raise BundleError("tokenizer-invalid", str(error), where="chat_template.jinja") from error
    found = _object(files, "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(found, list):
        named = [each for each in found if isinstance(each, dict)]
        found = {each.get("name"): each.get("template") for each in named}.get("default")
    return found if isinstance(found, str) else None


def _object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """A file's object; an empty one where there is no such file."""
    try:
        found: dict[str, Any] = msgspec.json.decode(files.get(name, b"{}"), type=dict)
    except (ValueError, RecursionError) as error:
        raise BundleError("tokenizer-invalid", str(error), where=name) from error
    return found


def _content(token: Any) -> Any:
    """A special token's text, which may stand in an object."""
    return token.get("content") if isinstance(token, dict) else token
