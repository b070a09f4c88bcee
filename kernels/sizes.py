"""torch's symbolic sizes as expressions of the bundle's language. Only tracing needs them: this loads sympy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import CeilDiv, FloorDiv, Max, Min, Mod, PythonMod

from precast.ir.graph import symbols
from precast.ir.graph.schema import Apply, Expr

_BINARY = {FloorDiv: "floordiv", Mod: "mod", PythonMod: "mod", CeilDiv: "ceildiv"}


class NoExpressionError(Exception):
    """The size depends on something that an expression can't say."""


def expression(size: int | torch.SymInt, named: Callable[[str], Expr | None]) -> Expr:
    """The size in normal form; `named` gives what stands for one of torch's symbols.

    Raises NoExpressionError for a symbol that stands for nothing, and for a function that expressions don't have.
    """
    return size if isinstance(size, int) else symbols.normal(_convert(size.node.expr, named))


def _convert(expr: Any, named: Callable[[str], Expr | None]) -> Expr:
    if isinstance(expr, sympy.Integer):
        return int(expr)
    found = named(expr.name) if isinstance(expr, sympy.Symbol) else None
    if found is not None:
        return found
    args = tuple(_convert(arg, named) for arg in expr.args)
    if isinstance(expr, sympy.Add):
        return symbols.add(*args)
    if isinstance(expr, sympy.Mul):
        return symbols.mul(*args)
    if isinstance(expr, sympy.Pow) and isinstance(args[1], int) and args[1] > 0:
        return symbols.mul(*([args[0]] * args[1]))
    if isinstance(expr, (Max, sympy.Max)):
        return Apply("max", args)
    if isinstance(expr, (Min, sympy.Min)):
        return Apply("min", args)
    if type(expr) in _BINARY:
        return Apply(_BINARY[type(expr)], args)  # type: ignore[arg-type]
    raise NoExpressionError(str(expr))
