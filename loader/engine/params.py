"""What a request may ask of sampling."""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
from collections.abc import Callable, Sequence
from typing import Any

from precast.ir.errors import RequestError, shown_value
from precast.loader.engine.values import as_integer

MAX_INT32, MAX_INT64 = 2**31 - 1, 2**63 - 1
MAX_FLOAT32 = 3.4028234663852886e38


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one answer are chosen, and when it ends.

    `max_tokens`: the longest answer, in tokens; None: as long as the model's limit allows. `temperature`: 0 takes the
    likeliest token; above 0 logits are divided by it. Of the tokens, `top_k` keeps the k likeliest (None: all), `top_p`
    the likeliest that together reach this probability (1: all), `min_p` those at least this fraction as likely as the
    likeliest (0: all). `seed`: equal seeds give equal answers, whatever else is served in the same step; None draws one
    for each request. `stop`: a string or several; the answer ends before the first of them that its text contains.
    `ignore_eos`: an end-of-sequence token doesn't end the answer.

    What vLLM and transformers write for "off" is taken too: a `top_k` or `seed` of -1, a `top_k` of 0, None for
    `top_p`, `min_p` and `stop`. The fields then have the values above, and numbers of numpy become Python's.

    Raises RequestError for a value outside its range and for an unknown option.
    """

    max_tokens: int | None = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = 1.0
    min_p: float | None = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    ignore_eos: bool = False

    def __new__(cls, *_: object, **options: object) -> SamplingParams:
        """Refuse unknown options by name, before the generated `__init__` would with a TypeError."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options.keys() - set(known):
            import difflib

            near = [] if name in _FOREIGN else difflib.get_close_matches(name, known, n=1)
            raise RequestError(
                "sampling-invalid",
                f"{name!r} is no sampling option; the options are {', '.join(known)}",
                fix=f"did you mean {near[0]!r}?" if near else _FOREIGN.get(name),
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, (allows, expected) in _RANGES.items():
            given = getattr(self, name)
            value = _plain(name, given)
            if not allows(value):
                raise RequestError("sampling-invalid", f"{name} is {shown_value(given)}, expected {expected}")
            object.__setattr__(self, name, value)

    def max_length(self, prompt_length: int, limit: int) -> int:
        """The longest prompt with its answer, in tokens, for a model that takes at most `limit`."""
        return limit if self.max_tokens is None else min(prompt_length + self.max_tokens, limit)


def params_of(params: object, num_prompts: int) -> Sequence[SamplingParams | None]:
    """The params of each prompt, from one for all, one for each, or None. Raises RequestError for anything else."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence):
        raise RequestError("sampling-invalid", f"params is a {type(params).__name__}, expected SamplingParams")
    if len(params) != num_prompts:
        raise RequestError("sampling-invalid", f"{len(params)} params for {num_prompts} prompts, expected one for each")
    return params


def _plain(name: str, value: object) -> object:
    """The value as the field has it: one spelling of "off", numbers of Python, a tuple of stop strings."""
    if name == "stop":
        value = () if value is None else (value,) if isinstance(value, str) else value
        return tuple(value) if isinstance(value, Sequence) else value
    number = as_integer(value)
    if number is not None:
        value = number
    elif isinstance(value, numbers.Real) and type(value) not in (float, bool):
        with contextlib.suppress(OverflowError):
            value = float(value)
    spellings, off = _OFF.get(name, ((), None))
    return off if (value is None or type(value) is int) and value in spellings else value


def _is_int(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: object, most: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= most


def _is_stop(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(text, str) and text for text in value)


_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    # option: (whether it allows a value, what it allows)
    "max_tokens": (
        lambda value: value is None or _is_int(value, 1, MAX_INT64),
        "an integer from 1 to 2**63 - 1, or None for the model's limit",
    ),
    "temperature": (lambda value: _is_number(value, MAX_FLOAT32), "a number from 0 (greedy) to 3.4e38"),
    "top_k": (
        lambda value: value is None or _is_int(value, 1, MAX_INT32),
        "an integer from 1 to 2**31 - 1, or None, 0 or -1 for all tokens",
    ),
    "top_p": (lambda value: _is_number(value, 1) and value > 0, "a number above 0 and at most 1 (all tokens)"),
    "min_p": (lambda value: _is_number(value, 1), "a number from 0 (all tokens) to 1"),
    "seed": (
        lambda value: value is None or _is_int(value, 0, MAX_INT64),
        "an integer from 0 to 2**63 - 1, or None or -1 for a random one",
    ),
    "stop": (_is_stop, "a string or a list of strings, none of them empty"),
    "ignore_eos": (lambda value: isinstance(value, bool), "True or False"),
}

_OFF: dict[str, tuple[tuple[int | None, ...], Any]] = {
    # option: (how vLLM and transformers spell that it is off, the value that the field has then)
    "top_k": ((-1, 0), None),
    "top_p": ((None,), 1.0),
    "min_p": ((None,), 0.0),
    "seed": ((-1,), None),
}

_FOREIGN = {
    # what other libraries call an option, or have besides: what to do
    "stop_strings": "did you mean 'stop'?",
    "stop_sequences": "did you mean 'stop'?",
    "do_sample": "leave it out: a temperature above 0 draws, 0 takes the likeliest token",
    "n": "leave it out, and give the prompt so many times",
    "min_tokens": "leave it out: Precast has nothing like it",
    "typical_p": "leave it out: Precast has nothing like it",
}
