"""The exporter's symbolic sizes as expressions of the bundle's language.

Sizes are compared as expressions, never as SymInts: a comparison of SymInts may be decided by the example's sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import CeilDiv, FloorDiv, Max, Min, Mod, PythonMod

from precast.ir.errors import BuildError
from precast.ir.graph import symbols
from precast.ir.graph.schema import Apply, Expr

_BINARY = {FloorDiv: "floordiv", Mod: "mod", PythonMod: "mod", CeilDiv: "ceildiv"}


def expr_of(size: int | torch.SymInt, names: Mapping[str, Expr]) -> Expr:
    """The size as an expression in normal form; `names` maps the exporter's symbols to ours.

    Raises BuildError("export-failed") for a size that depends on something else than the packed batch.
    """
    if isinstance(size, int):
        return size
    return symbols.normal(_convert(size.node.expr, names))


def shape_of(tensor: torch.Tensor, names: Mapping[str, Expr]) -> tuple[Expr, ...]:
    """The tensor's sizes as expressions."""
    return tuple(expr_of(size, names) for size in tensor.shape)


def _convert(expr: Any, names: Mapping[str, Expr]) -> Expr:
    if isinstance(expr, sympy.Integer):
        return int(expr)
    if isinstance(expr, sympy.Symbol) and expr.name in names:
        return names[expr.name]
    args = [] if isinstance(expr, sympy.Symbol) else [_convert(arg, names) for arg in expr.args]
    if isinstance(expr, sympy.Add):
        return symbols.add(*args)
    if isinstance(expr, sympy.Mul):
        return symbols.mul(*args)
    if isinstance(expr, sympy.Pow) and isinstance(args[1], int) and args[1] > 0:
        return symbols.mul(*([args[0]] * args[1]))
    if isinstance(expr, (Max, sympy.Max)):
        return Apply("max", tuple(args))
    if isinstance(expr, (Min, sympy.Min)):
        return Apply("min", tuple(args))
    if type(expr) in _BINARY:
        return Apply(_BINARY[type(expr)], tuple(args))  # type: ignore[arg-type]
    raise BuildError("export-failed", f"a size depends on {expr}, which is no size of the packed batch")
