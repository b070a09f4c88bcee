"""What chooses experts: the reference, everywhere."""

from __future__ import annotations

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import mul
from precast.kernels.records import reference
from precast.kernels.use import Use, numbers, wide


def _route(use: Use) -> Expr:
    """Scores, ranks and the places of the sorted ones."""
    return mul(8 * wide(use.operands["logits"]), numbers(use.operands["logits"]))


RECORDS = (reference("precast.route", "route.route", _route),)
