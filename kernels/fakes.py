"""What torch traces in the place of an op: contiguous results of its shape rule's types, without values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from precast.ir.graph import symbols
from precast.ir.graph.schema import Expr, TensorType
from precast.ir.ops.op import OpDef, ShapeError
from precast.kernels.calls import bound
from precast.kernels.dtypes import BY_NAME, NAMES
from precast.kernels.sizes import NoExpressionError, expression

Size = int | torch.SymInt


def fake_of(op: OpDef) -> Callable[..., Any]:
    """The op on fake tensors."""

    def fake(*positional: Any, **named: Any) -> Any:
        given = bound(op.args, positional, named)
        tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
        made = tuple(
            tensors[0].new_empty(shape, dtype=BY_NAME[kind.dtype])
            for kind, shape in _results(op, given, [size for x in tensors for size in x.shape])
        )
        return made if len(made) > 1 else made[0] if made else None

    return fake


def _results(op: OpDef, given: Mapping[str, Any], sizes: list[Size]) -> list[tuple[TensorType, list[Size]]]:
    try:
        known: dict[Expr, Size] = {_symbolic(size): size for size in sizes}
        types = op.shape_rule({name: _argument(value, _symbolic) for name, value in given.items()})
        return [(kind, [_value(size, known) for size in kind.shape]) for kind in types]
    except (ShapeError, NoExpressionError, KeyError):
        if all(isinstance(size, int) for size in sizes):
            raise
        # Symbols that are related by their values alone, as where torch makes every size of a call dynamic.
        types = op.shape_rule({name: _argument(value, int) for name, value in given.items()})
        return [(kind, [symbols.evaluate(size, {}) for size in kind.shape]) for kind in types]


def _value(size: Expr, known: Mapping[Expr, Size]) -> Size:
    named = {name: value for name, value in known.items() if isinstance(name, str)}
    return known[size] if size in known else symbols.evaluate(size, named)


def _symbolic(size: Size) -> Expr:
    return expression(size, lambda name: name)


def _argument(value: Any, as_expr: Callable[[Size], Expr]) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorType(NAMES[value.dtype], tuple(map(as_expr, value.shape)))
    if isinstance(value, torch.SymInt):
        return as_expr(value)
    return NAMES[value] if isinstance(value, torch.dtype) else value
