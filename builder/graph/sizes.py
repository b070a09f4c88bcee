"""The exporter's symbolic sizes as expressions of the bundle's language.

Sizes are compared as expressions, never as SymInts: a comparison of SymInts may be decided by the example's sizes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from precast.ir.errors import BuildError
from precast.ir.graph.schema import Expr
from precast.kernels.sizes import NoExpressionError, expression


def expr_of(size: int | torch.SymInt, names: Mapping[str, Expr]) -> Expr:
    """The size as an expression in normal form; `names` maps the exporter's symbols to ours.

    Raises BuildError("export-failed") for a size that depends on something else than the packed batch.
    """
    try:
        return expression(size, names.get)
    except NoExpressionError as error:
        message = f"a size depends on {error}, which is no size of the packed batch"
        raise BuildError("export-failed", message) from error
