"""Functions that are called as an op is: with the arguments of its signature, which stands in the op table alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar, get_type_hints

from precast.ir.ops import table as ops
from precast.ir.ops.op import ArgDef

Result = TypeVar("Result")


def implements(op: str, version: int = 1) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Makes a function callable by the signature of `precast.<op>`, whose defaults it need not repeat.

    It takes the arguments that its parameters name. A parameter that is a NamedTuple takes those that the tuple's
    fields name, as one.
    """
    args = arguments(f"precast.{op}", version)
    signature = inspect.Signature([_parameter(arg) for arg in args])

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        hints = get_type_hints(function)
        groups = {name: _fields(hints.get(name)) for name in inspect.signature(function).parameters}

        @wraps(function)
        def call(*positional: Any, **named: Any) -> Result:
            given = bound(args, positional, named)
            grouped = {
                name: given[name] if fields is None else hints[name](*(given[field] for field in fields))
                for name, fields in groups.items()
            }
            return function(**grouped)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate


def arguments(op: str, version: int = 1) -> tuple[ArgDef, ...]:
    """The arguments of an op of the op table."""
    definition = ops.lookup(op, version)
    assert definition is not None, f"{op}@{version} is not in the op table"
    return definition.args


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


def _fields(hint: Any) -> tuple[str, ...] | None:
    return getattr(hint, "_fields", None)
