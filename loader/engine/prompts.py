"""Prompts as users give them, checked and turned into token ids."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from precast.ir.errors import RequestError, shown_value
from precast.ir.manifest import ModelInfo
from precast.loader.engine.params import SamplingParams, params_of
from precast.loader.engine.tokenizer import Tokenizer
from precast.loader.engine.values import as_integer, check_flag, is_iterable, is_tensor, token_ids

Prompt = str | Sequence[int]
"""Text, or token ids: a list, a tuple, a one-dimensional tensor or array of integers."""


TokenizerOf = Callable[[], Tokenizer | None]
"""Gives the bundle's tokenizer, None where it has none; called when it is first needed."""


def check_prompts(
    prompts: object, params: object, model: ModelInfo, tokenizer: TokenizerOf, *, add_special_tokens: bool = True
) -> None:
    """Raise RequestError for the first prompt, or params of one, that the model can't serve.

    It takes the arguments of `Engine.generate`, and needs no engine: what remains for it is whether the cache, whose
    size is known when the weights are loaded, can hold them.
    """
    listed = prompts_of(prompts)
    for i, (prompt, each) in enumerate(zip(listed, params_of(params, len(listed)), strict=True)):
        try:
            check_prompt(prompt, check_params(each), model, tokenizer, add_special_tokens=add_special_tokens)
        except RequestError as error:
            raise error.inside(f"prompt {i}") from None


def check_params(params: object) -> SamplingParams:
    """The params, or the defaults for None. Raises RequestError for anything else."""
    params = SamplingParams() if params is None else params
    if not isinstance(params, SamplingParams):
        raise RequestError("sampling-invalid", f"params is a {type(params).__name__}, expected SamplingParams")
    return params


def check_priority(priority: object) -> int:
    """The priority as an integer of Python. Raises RequestError for anything else."""
    number = as_integer(priority)
    if number is None:
        raise RequestError("engine-option-invalid", f"priority is {shown_value(priority)}, expected an integer")
    return number


def check_progress(progress: object) -> None:
    """Raise RequestError for what can't be called."""
    if progress is not None and not callable(progress):
        message = (
            f"progress is {shown_value(progress)}, expected a function of two numbers: answers that have ended, all"
        )
        raise RequestError("engine-option-invalid", message)


def check_prompt(
    prompt: object,
    params: SamplingParams,
    model: ModelInfo,
    tokenizer: TokenizerOf,
    *,
    add_special_tokens: bool = True,
) -> array[int]:
    """The prompt's token ids. Raises RequestError where the model can't answer it with these params."""
    ids = token_ids_of(prompt, model, tokenizer, add_special_tokens=add_special_tokens, is_answered=True)
    if params.stop and tokenizer() is None:
        raise RequestError("tokenizer-missing", "stop strings are given, and the bundle has no tokenizer")
    return ids


def token_ids_of(
    prompt: object,
    model: ModelInfo,
    tokenizer: TokenizerOf,
    *,
    add_special_tokens: bool = True,
    is_answered: bool = False,
) -> array[int]:
    """The prompt's token ids, int64, at least one, each in `0 .. vocab_size - 1`, and no more than `max_seq_len`.

    One that `is_answered` leaves room for a token. `tokenizer` is called for text only, and `add_special_tokens`
    matters for it only. Raises RequestError that says what was given and what was expected.
    """
    check_flag("add_special_tokens", add_special_tokens)
    most = model.max_seq_len - is_answered
    if isinstance(prompt, str):
        ids = array("q", _encode(prompt, tokenizer(), add_special_tokens))
        length: object = len(ids)
    else:
        ids = token_ids(prompt, "the prompt", most=most + 1)  # what has no end is read so far
        length = len(ids) if len(ids) <= most else _length(prompt, most)
    if not ids:
        raise RequestError(
            "prompt-empty",
            "the prompt has no tokens, expected at least one",
            fix="to start from nothing, pass the beginning-of-sequence token id: [bos_token_id]",
        )
    if len(ids) > most:
        raise _too_long(length, model, " and at least one token of answer" if is_answered else "")
    for place, token in enumerate(ids) if min(ids) < 0 or max(ids) >= model.vocab_size else ():
        if not 0 <= token < model.vocab_size:
            size = model.vocab_size
            raise RequestError(
                "token-out-of-range",
                f"token {place} of the prompt is {token}, expected 0 to {size - 1} (vocab_size {size})",
                fix="encode the prompt with this model's own tokenizer",
            )
    return ids


def prompts_of(prompts: object) -> list[object]:
    """The prompts of one `generate` call: a list of them, or one text alone."""
    if isinstance(prompts, str):
        return [prompts]
    if is_tensor(prompts):
        prompts = prompts.tolist()  # type: ignore[attr-defined]
    if not is_iterable(prompts):
        message = f"prompts is a {type(prompts).__name__}, expected a list of prompts"
        raise RequestError("prompt-invalid", message)
    listed = list(prompts)
    if listed and all(as_integer(item) is not None for item in listed):
        raise RequestError(
            "prompt-invalid",
            "prompts is a list of integers, expected a list of prompts",
            fix="for one prompt of token ids, pass a list that holds it: [[1, 15, 27]]",
        )
    return listed


def _too_long(length: object, model: ModelInfo, more: str) -> RequestError:
    """The error of a prompt of `length` tokens that, with `more`, the model's limit doesn't allow."""
    return RequestError(
        "prompt-too-long",
        f"the prompt has {length} tokens; it{more} must fit max_seq_len, {model.max_seq_len}",
        fix="shorten the prompt, or build the bundle with a larger max_seq_len if the model allows it",
    )


def _length(prompt: object, most: int) -> int | str:
    """How many items it has, where it knows."""
    try:
        return len(prompt)  # type: ignore[arg-type]
    except (TypeError, OverflowError):  # a generator, a range without end
        return f"more than {most}"


def _encode(text: str, tokenizer: Tokenizer | None, add_special_tokens: bool) -> list[int]:
    if tokenizer is None:
        raise RequestError(
            "tokenizer-missing",
            "the prompt is text, and the bundle has no tokenizer",
            fix="pass token ids, or build the bundle from a directory with a tokenizer.json",
        )
    # Also where a special token would be put in front: whether "" is allowed must not depend on the tokenizer.
    return tokenizer.encode(text, add_special_tokens=add_special_tokens) if text else []
