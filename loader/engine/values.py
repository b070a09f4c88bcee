"""Numbers and flags as users give them: of Python, of numpy, in a tensor. What they are for is not known here."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable
from itertools import islice
from typing import Any, TypeGuard

from precast.ir.errors import RequestError, shown_value


def as_integer(value: object) -> int | None:
    """The Python integer of an integer of any library; None for all else, booleans, floats and tensors too."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or is_tensor(value) or getattr(value, "ndim", 0) != 0:
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def is_tensor(value: object) -> bool:
    """Whether it is a tensor of torch, which this room doesn't import."""
    return hasattr(value, "is_cuda") and hasattr(value, "tolist")


def is_iterable(value: object) -> TypeGuard[Iterable[Any]]:
    """Whether it has items in an order: no mapping, no set, no bytes, no array without dimensions."""
    unordered = isinstance(value, (bytes, bytearray, dict, set, frozenset))
    return isinstance(value, Iterable) and not unordered and getattr(value, "ndim", 1) != 0


def token_ids(
    given: object, of: str, *, expected: str = "text or a list of token ids", most: int | None = None
) -> array[int]:
    """The first `most` token ids of a list, a tuple, or a one-dimensional tensor or array; int64.

    Raises RequestError for what is none of these, and names place and value of what is no 64-bit integer. In its
    message, `of` says what the ids are of, and `expected` what was to be given.
    """
    is_scalar = getattr(given, "ndim", None) == 0
    items = given.tolist() if is_tensor(given) or is_scalar else given  # type: ignore[attr-defined]
    if isinstance(items, str) or not is_iterable(items):
        raise RequestError("prompt-invalid", f"{of} is a {type(items).__name__}, expected {expected}")
    ids = array("q")
    for place, item in enumerate(islice(items, most)):
        number = as_integer(item)
        if number is None:
            message = (
                f"token {place} of {of} is {shown_value(item)} ({type(item).__name__}), expected an integer token id"
            )
            raise RequestError("prompt-invalid", message)
        try:
            ids.append(number)
        except OverflowError:
            message = f"token {place} of {of} is {shown_value(number)}, no 64-bit id"
            raise RequestError("token-out-of-range", message) from None
    return ids


def check_flag(name: str, value: object) -> None:
    """Raise RequestError for an option that is neither True nor False."""
    if not isinstance(value, bool):
        raise RequestError("engine-option-invalid", f"{name} is {shown_value(value)}, expected True or False")
