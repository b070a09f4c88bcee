"""Makes a function callable with the arguments of an op's signature, which is written in the op table alone.

A function that has a parameter `out` writes its result there: it is called with `out` besides, or without it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, get_type_hints

from precast.ir.ops import table as ops
from precast.ir.ops.op import ArgDef, OpDef

Result = TypeVar("Result")

_OUT = ArgDef("out", "Tensor?", keyword_only=True, has_default=True)


def implements(op: str, version: int = 1) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Makes a function callable by the signature of `precast.<op>`, whose defaults it need not repeat.

    It takes the arguments that its parameters name. A parameter that is a NamedTuple takes those that the tuple's
    fields name, as one.
    """

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        hints = get_type_hints(function)
        groups = {name: getattr(hints[name], "_fields", None) for name in inspect.signature(function).parameters}

        def grouped(given: dict[str, Any]) -> Result:
            return function(
                *(
                    given[name] if fields is None else hints[name](*(given[field] for field in fields))
                    for name, fields in groups.items()
                )
            )

        return called_as(op, grouped, version, like=function)

    return decorate


def called_as(
    op: str, function: Callable[[dict[str, Any]], Result], version: int = 1, *, like: Callable[..., Any]
) -> Callable[..., Result]:
    """`function`, which takes all arguments of `precast.<op>` by name in one dictionary, called as the op is.

    What is written about the result is what is written about `like`.
    """
    definition = ops.lookup(f"precast.{op}", version)
    assert definition is not None, f"precast.{op}@{version} is not in the op table"
    return with_signature(definition, function, like=like)


def with_signature(
    definition: OpDef, function: Callable[[dict[str, Any]], Result], *, like: Callable[..., Any]
) -> Callable[..., Result]:
    """As `called_as`, for a row of the op table."""
    args = (*definition.args, *((_OUT,) if "out" in inspect.signature(like).parameters else ()))

    def call(*positional: Any, **named: Any) -> Result:
        return function(bound(args, positional, named))

    name = definition.name.removeprefix("precast.")
    call.__module__, call.__name__, call.__qualname__, call.__doc__ = like.__module__, name, name, like.__doc__
    call.__signature__ = inspect.Signature(list(map(_parameter, args)))  # type: ignore[attr-defined]
    return call


def bound(args: Sequence[ArgDef], positional: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all of `args` by name. Raises TypeError for those that are missing, and for others."""
    given = {arg.name: arg.default for arg in args if arg.has_default}
    given.update(zip([arg.name for arg in args], positional, strict=False))
    given.update(named)
    if len(given) != len(args) or len(positional) > len(args):
        expected = {arg.name for arg in args}
        raise TypeError(f"missing: {sorted(expected - given.keys())}, not taken: {sorted(given.keys() - expected)}")
    return given


def _parameter(arg: ArgDef) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY if arg.keyword_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(arg.name, kind, default=arg.default if arg.has_default else inspect.Parameter.empty)
