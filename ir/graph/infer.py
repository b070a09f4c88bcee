"""A node's arguments against its op's signature, and the result types that the op's rule gives them.

The one place that knows which argument of the schema fits which kind of the op table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from precast.ir.graph.schema import Arg, Const, Dim, DtypeArg, Items, Ref, Steps, TensorType
from precast.ir.graph.symbols import ExprError
from precast.ir.ops.op import ArgDef, Kind, OpDef, ShapeError


def apply_shape_rule(op: OpDef, args: Mapping[str, Arg], types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """The types of the op's results, in order, for arguments that fit the signature and refer only to names in `types`.

    Raises ShapeError, with what the op's shape rule expected.
    """
    given = {arg.name: _bound(args[arg.name], types) if arg.name in args else arg.default for arg in op.args}
    try:
        return op.shape_rule(given)
    except ExprError as error:
        raise ShapeError(str(error)) from error


def misfits(op: OpDef, args: Mapping[str, Arg]) -> Iterator[str]:
    """All ways in which the arguments don't fit the signature: missing, unknown, or of another kind."""
    for arg in op.args:
        given = args.get(arg.name)
        if given is None:
            if not arg.has_default:
                yield f"{arg.name}: required, not given"
        elif not _fits(arg, given):
            yield f"{arg.name}: expected {arg.kind}, found {_kind_of(given)}"
    names = [arg.name for arg in op.args]
    for name in args:
        if name not in names:
            yield f"{name}: not an argument; the arguments are {', '.join(names)}"


def references(args: Mapping[str, Arg]) -> Iterator[str]:
    """The names that the arguments refer to, in order."""
    return (arg.name for _, arg in flat(args) if isinstance(arg, Ref))


def named_references(args: Mapping[str, Arg]) -> Iterator[tuple[str, str]]:
    """What the arguments refer to, each with its argument's name; of those in a list "tensors.0", "tensors.1", ..."""
    for name, arg in args.items():
        if isinstance(arg, Ref):
            yield name, arg.name
        elif isinstance(arg, Items):
            yield from ((f"{name}.{i}", item.name) for i, item in enumerate(arg.items) if isinstance(item, Ref))


def flat(args: Mapping[str, Arg]) -> Iterator[tuple[str, Ref | Const | Dim | DtypeArg]]:
    """The arguments by name, those of a list one by one, and of a fused op's steps those that are no names."""
    for name, arg in args.items():
        if isinstance(arg, Steps):
            of_steps = (item for step in arg.steps for _, item in flat(step.args))
            yield from ((name, item) for item in of_steps if not isinstance(item, Ref))
        else:
            yield from ((name, item) for item in (arg.items if isinstance(arg, Items) else (arg,)))


def _fits(definition: ArgDef, arg: Arg) -> bool:
    if isinstance(arg, Const) and arg.value is None:
        return definition.kind.endswith("?") or (definition.has_default and definition.default is None)
    return _FITS[definition.kind](arg)


def _is_integer(arg: Arg) -> bool:
    return isinstance(arg, Dim) or (isinstance(arg, Const) and type(arg.value) is int)


def _is_number(arg: Arg) -> bool:
    return isinstance(arg, Dim) or (isinstance(arg, Const) and type(arg.value) in (bool, int, float))


def _literal(kind: type) -> Callable[[Arg], bool]:
    return lambda arg: isinstance(arg, Const) and type(arg.value) is kind


def _list(fits: Callable[[Arg], bool]) -> Callable[[Arg], bool]:
    return lambda arg: isinstance(arg, Items) and all(map(fits, arg.items))


def _is_ref(arg: Arg) -> bool:
    return isinstance(arg, Ref)


_FITS: dict[Kind, Callable[[Arg], bool]] = {
    "Tensor": _is_ref,
    "Tensor?": _is_ref,
    "Tensor[]": _list(_is_ref),
    "Tensor|Scalar": lambda arg: _is_ref(arg) or _is_number(arg),
    "int": _is_integer,
    "int?": _is_integer,
    "int[]": _list(_is_integer),
    "int[]?": _list(_is_integer),
    "float": _literal(float),
    "float?": _literal(float),
    "bool": _literal(bool),
    "str": _literal(str),
    "Dtype": lambda arg: isinstance(arg, DtypeArg),
    "Scalar": _is_number,
    "Steps": lambda arg: isinstance(arg, Steps),
    "Group": _literal(str),
}


def _kind_of(arg: Arg) -> str:
    if isinstance(arg, Items):
        return f"[{', '.join(_kind_of(item) for item in arg.items[:4])}{', ...' if len(arg.items) > 4 else ''}]"
    if isinstance(arg, Const):
        not_a_number = isinstance(arg.value, float) and math.isnan(arg.value)
        return "nan" if not_a_number else "none" if arg.value is None else f"{type(arg.value).__name__} {arg.value!r}"
    return {Ref: "a tensor", Dim: "a size", DtypeArg: "a dtype", Steps: "steps"}[type(arg)]


def _bound(arg: Arg, types: Mapping[str, TensorType]) -> Any:
    if isinstance(arg, Ref):
        return types[arg.name]
    if isinstance(arg, Const):
        return arg.value
    if isinstance(arg, Dim):
        return arg.expr
    if isinstance(arg, DtypeArg):
        return arg.dtype
    if isinstance(arg, Steps):
        return arg
    return tuple(_bound(item, types) for item in arg.items)
