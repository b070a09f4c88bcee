"""Prompts as users give them, checked and turned into token ids."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Iterable, Sequence

from precast.ir.errors import RequestError
from precast.ir.manifest import ModelInfo
from precast.loader.engine.params import SamplingParams, params_of
from precast.loader.engine.tokenizer import Tokenizer

Prompt = str | Sequence[int]
"""Text, or token ids: a list, a tuple, a one-dimensional tensor or array of integers."""


TokenizerOf = Callable[[], Tokenizer | None]
"""Gives the bundle's tokenizer, None where it has none; called when it is first needed."""


def check_prompts(prompts: object, params: object, model: ModelInfo, tokenizer: TokenizerOf) -> None:
    """Raise RequestError for the first prompt, or params of one, that the model can't serve.

    It takes the arguments of `Engine.generate`, and needs no engine: what remains for it is whether the cache, whose
    size is known when the weights are loaded, can hold them.
    """
    listed = prompts_of(prompts)
    for i, (prompt, each) in enumerate(zip(listed, params_of(params, len(listed)), strict=True)):
        try:
            check_prompt(prompt, check_params(each), model, tokenizer)
        except RequestError as error:
            raise error.inside(f"prompt {i}") from None


def check_params(params: object) -> SamplingParams:
    """The params, or the defaults for None. Raises RequestError for anything else."""
    params = SamplingParams() if params is None else params
    if not isinstance(params, SamplingParams):
        raise RequestError("sampling-invalid", f"params is a {_kind(params)}, expected SamplingParams")
    return params


def check_prompt(prompt: object, params: SamplingParams, model: ModelInfo, tokenizer: TokenizerOf) -> array[int]:
    """The prompt's token ids. Raises RequestError where the model can't answer it with these params."""
    ids = token_ids_of(prompt, tokenizer=tokenizer, vocab_size=model.vocab_size)
    if len(ids) >= model.max_seq_len:
        raise too_long(len(ids), model, " and at least one token of answer")
    if params.stop and tokenizer() is None:
        raise RequestError("tokenizer-missing", "stop strings are given, and the bundle has no tokenizer")
    return ids


def too_long(length: int, model: ModelInfo, more: str) -> RequestError:
    """The error of a prompt of `length` tokens that, with `more`, the model's limit doesn't allow."""
    return RequestError(
        "prompt-too-long",
        f"the prompt has {length} tokens; it{more} must fit max_seq_len, {model.max_seq_len}",
        fix="shorten the prompt, or build the bundle with a larger max_seq_len if the model allows it",
    )


def token_ids_of(prompt: object, *, tokenizer: TokenizerOf, vocab_size: int) -> array[int]:
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
    if _is_tensor(prompt):
        prompt = prompt.tolist()  # type: ignore[attr-defined]
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
    is_array = _is_tensor(item) or getattr(item, "ndim", 0) != 0
    return hasattr(item, "__index__") and not is_array and not isinstance(item, bool)


def _is_tensor(value: object) -> bool:
    """Whether it is a tensor of torch, which this room doesn't import."""
    return hasattr(value, "is_cuda") and hasattr(value, "tolist")


def _kind(value: object) -> str:
    return type(value).__name__
