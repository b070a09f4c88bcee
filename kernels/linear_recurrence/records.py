"""What computes linear recurrences: spans that double."""

from __future__ import annotations

from precast.ir.graph.schema import Expr
from precast.kernels.state_records import doubled, forms
from precast.kernels.use import Use


def _state(use: Use) -> tuple[Expr, ...]:
    return use.shape("x")[2:]


RECORDS = forms("linear_recurrence", "doubled", doubled(6), _state)
