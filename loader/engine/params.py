"""What a request may ask of sampling."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Sequence
from typing import Any

from precast.ir.errors import RequestError

MAX_INT32, MAX_INT64 = 2**31 - 1, 2**63 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one answer are chosen, and when it ends.

    `max_tokens`: the longest answer, in tokens. `temperature`: 0 takes the likeliest token; above 0 logits are divided
    by it. Of the tokens, `top_k` keeps the k likeliest (None: all), `top_p` the likeliest that together reach this
    probability (1: all), `min_p` those at least this fraction as likely as the likeliest (0: all). `seed`: equal seeds
    give equal answers, whatever else is served in the same step; None draws one for each request. `stop`: a string or
    several; the answer ends before the first of them that its text contains. `ignore_eos`: an end-of-sequence token
    doesn't end the answer.

    Raises RequestError for a value outside its range and for an unknown option.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False

    def __new__(cls, *_: object, **options: object) -> SamplingParams:
        """Refuse unknown options by name, before the generated `__init__` would with a TypeError."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options.keys() - set(known):
            near = difflib.get_close_matches(name, known, n=1)
            raise RequestError(
                "sampling-invalid",
                f"{name!r} is no sampling option; the options are {', '.join(known)}",
                fix=f"did you mean {near[0]!r}?" if near else None,
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, (allows, expected) in _RANGES.items():
            if not allows(getattr(self, name)):
                raise RequestError("sampling-invalid", f"{name} is {getattr(self, name)!r}, expected {expected}")
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))


def params_of(params: object, num_prompts: int) -> Sequence[SamplingParams | None]:
    """The params of each prompt, from one for all, one for each, or None. Raises RequestError for anything else."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence):
        raise RequestError("sampling-invalid", f"params is a {type(params).__name__}, expected SamplingParams")
    if len(params) != num_prompts:
        raise RequestError("sampling-invalid", f"{len(params)} params for {num_prompts} prompts, expected one for each")
    return params


def _is_int(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_stop(value: object) -> bool:
    if isinstance(value, str):
        return value != ""
    return isinstance(value, Sequence) and all(isinstance(text, str) and text for text in value)


_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    # option: (whether it allows a value, what it allows)
    "max_tokens": (lambda value: _is_int(value, 1, MAX_INT64), "an integer from 1 to 2**63 - 1"),
    "temperature": (lambda value: _is_number(value) and value >= 0, "a finite number of at least 0 (0: greedy)"),
    "top_k": (
        lambda value: value is None or _is_int(value, 1, MAX_INT32),
        "an integer from 1 to 2**31 - 1, or None for all tokens",
    ),
    "top_p": (lambda value: _is_number(value) and 0 < value <= 1, "a number above 0 and at most 1 (1: all tokens)"),
    "min_p": (lambda value: _is_number(value) and 0 <= value <= 1, "a number from 0 (all tokens) to 1"),
    "seed": (
        lambda value: value is None or _is_int(value, 0, MAX_INT64),
        "an integer from 0 to 2**63 - 1, or None for a random one",
    ),
    "stop": (_is_stop, "a string or a sequence of strings, none of them empty"),
    "ignore_eos": (lambda value: isinstance(value, bool), "True or False"),
}
