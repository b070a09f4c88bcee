"""Other expressions in place of symbols, in whatever holds expressions: a type, a node, a recipe, a plan of caches."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from precast.ir.graph import symbols
from precast.ir.graph.schema import Expr


def substituted(value: Any, kind: Any, values: Mapping[str, Expr]) -> Any:
    """`value`, of the type `kind` of the schema, with these expressions in place of symbols in each of its own."""
    if kind == Expr:
        return value if isinstance(value, int) else symbols.substitute(value, values)
    if isinstance(value, msgspec.Struct):
        kinds = _fields_with_sizes(type(value))
        if not kinds:
            return value
        changes = {name: substituted(getattr(value, name), each, values) for name, each in kinds.items()}
        return msgspec.structs.replace(value, **changes)
    if isinstance(value, tuple):
        item = typing.get_args(kind)[0]
        return tuple([substituted(each, item, values) for each in value])
    if isinstance(value, dict):
        item = typing.get_args(kind)[1]
        return {key: substituted(each, item, values) for key, each in value.items()}
    return value


@cache
def _fields_with_sizes(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """The fields of a struct that may hold expressions, with their types."""
    return {name: kind for name, kind in _hints(struct).items() if _may_hold(kind, frozenset((struct,)))}


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
    return any(_may_hold(each, above) for each in typing.get_args(kind))
