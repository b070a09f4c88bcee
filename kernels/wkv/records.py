"""What computes weighted key-value averages: spans that double."""

from __future__ import annotations

from precast.ir.graph.schema import Expr
from precast.kernels.state_records import doubled, forms
from precast.kernels.use import Use


def _state(use: Use) -> tuple[Expr, ...]:
    return (3, use.shape("v")[2])


RECORDS = forms("wkv", "doubled", doubled(17), _state)
