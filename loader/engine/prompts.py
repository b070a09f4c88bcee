"""Prompts as users give them, checked and turned into token ids."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Iterable, Sequence

import torch

from precast.ir.errors import RequestError
from precast.loader.engine.tokenizer import Tokenizer

Prompt = str | Sequence[int]
"""Text, or token ids: a list, a tuple, a one-dimensional tensor or array of integers."""


def token_ids_of(prompt: object, *, tokenizer: Callable[[], Tokenizer | None], vocab_size: int) -> array[int]:
    """The prompt's token ids, int64, at least one, each in `0 .. vocab_size - 1`.

    `tokenizer` is called for text only. Raises RequestError that says what was given and what was expected.
    """
    ids = array("q", _encode(prompt, tokenizer())) if isinstance(prompt, str) else _integers(prompt)
    if not ids:
        raise RequestError(
            "prompt-empty",
            "the prompt has no tokens, expected at least one",
            fix="to start from nothing, pass the beginning-of-sequence token id: [bos_token_id]",
        )
    for place, token in enumerate(ids) if min(ids) < 0 or max(ids) >= vocab_size else ():
        if not 0 <= token < vocab_size:
            raise RequestError(
                "token-out-of-range",
                f"token {place} of the prompt is {token}, expected 0 to {vocab_size - 1} (vocab_size {vocab_size})",
                fix="encode the prompt with this model's own tokenizer",
            )
    return ids


def prompts_of(prompts: object) -> list[object]:
    """The prompts of one `generate` call: a list of them, or one text alone."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, (bytes, dict)):
        raise RequestError("prompt-invalid", f"prompts is a {_kind(prompts)}, expected a list of prompts")
    listed = list(prompts)
    if listed and all(_is_integer(item) for item in listed):
        raise RequestError(
            "prompt-invalid",
            "prompts is a list of integers, expected a list of prompts",
            fix="for one prompt of token ids, pass a list that holds it: [[1, 15, 27]]",
        )
    return listed


def _encode(text: str, tokenizer: Tokenizer | None) -> list[int]:
    if tokenizer is None:
        raise RequestError(
            "tokenizer-missing",
            "the prompt is text, and the bundle has no tokenizer",
            fix="pass token ids, or build the bundle from a directory with a tokenizer.json",
        )
    # Also where a special token would be put in front: whether "" is allowed must not depend on the tokenizer.
    return tokenizer.encode(text) if text else []


def _integers(prompt: object) -> array[int]:
    if isinstance(prompt, torch.Tensor):
        prompt = prompt.tolist()
    if not isinstance(prompt, Iterable) or isinstance(prompt, (bytes, bytearray, dict, set)):
        raise RequestError("prompt-invalid", f"the prompt is a {_kind(prompt)}, expected text or a list of token ids")
    ids = array("q")
    for place, item in enumerate(prompt):
        if not _is_integer(item):
            raise RequestError(
                "prompt-invalid",
                f"token {place} of the prompt is {item!r} ({_kind(item)}), expected an integer token id",
            )
        try:
            ids.append(operator.index(item))
        except OverflowError:
            raise RequestError("token-out-of-range", f"token {place} of the prompt is {item}, no 64-bit id") from None
    return ids


def _is_integer(item: object) -> bool:
    """Integers of any library, and no booleans, floats or arrays, some of which have an `__index__` too."""
    is_array = isinstance(item, torch.Tensor) or getattr(item, "ndim", 0) != 0
    return hasattr(item, "__index__") and not is_array and not isinstance(item, bool)


def _kind(value: object) -> str:
    return type(value).__name__
