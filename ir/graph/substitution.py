"""Other expressions in place of symbols, in whatever holds expressions: a type, a node, a recipe, a plan of caches."""

from __future__ import annotations

import operator
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, cast

import msgspec

from precast.ir.graph import symbols
from precast.ir.graph.schema import Expr

Values = Mapping[str, Expr]


def substituted(value: Any, kind: Any, values: Values) -> Any:
    """`value`, of the type `kind` of the schema, with these expressions in place of symbols in each of its own."""
    return _in(kind)(value, values)


@cache
def _in(kind: Any) -> Callable[[Any, Values], Any]:
    """What substitutes in values of a type that may hold expressions."""
    if kind == Expr:
        return symbols.substitute
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        return _in_each(_in(arguments[0]))
    if typing.get_origin(kind) is dict:
        return _in_values(_in(arguments[1]))
    return _in_struct  # one, or one of several, or none


def _in_each(item: Callable[[Any, Values], Any]) -> Callable[[tuple[Any, ...], Values], tuple[Any, ...]]:
    def made(value: tuple[Any, ...], values: Values) -> tuple[Any, ...]:
        found = tuple([item(each, values) for each in value])
        return value if all(map(operator.is_, found, value)) else found

    return made


def _in_values(item: Callable[[Any, Values], Any]) -> Callable[[dict[str, Any], Values], dict[str, Any]]:
    def made(value: dict[str, Any], values: Values) -> dict[str, Any]:
        found = {key: item(each, values) for key, each in value.items()}
        return value if all(map(operator.is_, found.values(), value.values())) else found

    return made


def _in_struct(value: Any, values: Values) -> Any:
    changes, kind = {}, cast("Any", type(value))
    for name, substitute in _fields_with_sizes(kind).items():
        old = getattr(value, name)
        new = substitute(old, values)
        if new is not old:
            changes[name] = new
    return msgspec.structs.replace(value, **changes) if changes else value


@cache
def _fields_with_sizes(kind: Any) -> dict[str, Callable[[Any, Values], Any]]:
    """The fields of a struct that may hold expressions, with what substitutes in them."""
    if not issubclass(kind, msgspec.Struct):
        return {}
    return {name: _in(each) for name, each in _hints(kind).items() if _may_hold(each, frozenset((kind,)))}


@cache
def _hints(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """The types of a struct's fields."""
    return typing.get_type_hints(struct)


def _may_hold(kind: Any, above: frozenset[Any]) -> bool:
    """Whether a value of this type can hold an expression; a type that stands in itself is asked once."""
    if kind == Expr:
        return True
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = () if kind in above else _hints(kind).values()
        return any(_may_hold(each, above | {kind}) for each in hints)
    return typing.get_origin(kind) is not typing.Literal and any(
        _may_hold(each, above) for each in typing.get_args(kind)
    )
