"""The fake of an op, which torch traces in its place: contiguous results of its shape rule's types, without values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx.experimental.sym_node import SymNode

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
        empty = tensors[0].new_empty if tensors else torch.empty
        made = tuple(
            empty(shape, dtype=BY_NAME[kind.dtype])
            for kind, shape in _results(op, given, [size for x in tensors for size in x.shape])
        )
        return made if len(made) > 1 else made[0] if made else None

    return fake


def _results(op: OpDef, given: Mapping[str, Any], sizes: list[Size]) -> list[tuple[TensorType, list[Size]]]:
    try:
        symbols_of = _symbols(sizes)
        types = op.shape_rule({name: _argument(value, _symbolic) for name, value in given.items()})
    except (ShapeError, NoExpressionError):
        if all(isinstance(size, int) for size in sizes):
            raise
        # Symbols that fit by their values alone, as where torch makes every size of a call dynamic. No guard is set:
        # if that isn't meant, the results are at odds with the arguments, and the verifier refuses the graph.
        symbols_of = {}
        types = op.shape_rule({name: _argument(value, _hint) for name, value in given.items()})
    return [(kind, [symbols.evaluate(size, symbols_of) for size in kind.shape]) for kind in types]


def _symbols(sizes: list[Size]) -> dict[str, Any]:
    """The symbols that the sizes are made of, as SymInts by name."""
    symbolic = [size for size in sizes if isinstance(size, torch.SymInt)]
    made = {
        symbol.name: torch.SymInt(SymNode(symbol, size.node.shape_env, int, None))
        for size in symbolic
        for symbol in size.node.expr.free_symbols
    }
    return made | {size.node.expr.name: size for size in symbolic if size.node.expr.is_symbol}


def _hint(size: Size) -> int:
    known = size if isinstance(size, int) else size.node.hint
    if known is None:
        raise ShapeError(f"{size} has no value to fall back on")
    return int(known)


def _symbolic(size: Size) -> Expr:
    return expression(size, lambda name: name)


def _argument(value: Any, as_expr: Callable[[Size], Expr]) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorType(NAMES[value.dtype], tuple(map(as_expr, value.shape)))
    if isinstance(value, torch.SymInt):
        return as_expr(value)
    return NAMES[value] if isinstance(value, torch.dtype) else value
