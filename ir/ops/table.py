"""The op table: every operation that a graph may contain, one row for each version.

Anything outside this table is refused by name, at build and at load. Rows stand beside their shape rules, in a file
for each family (`rows_*.py`); what a row says is in `precast.ir.ops.op`.
"""

from __future__ import annotations

from functools import cache

from precast.ir.ops import (
    rows_attention,
    rows_collectives,
    rows_entries,
    rows_experts,
    rows_fused,
    rows_pointwise,
    rows_reductions,
    rows_rounded,
    rows_sparse,
    rows_states,
    rows_tokens,
    rows_views,
)
from precast.ir.ops.op import OpDef

_ROW_FILES = (
    rows_attention, rows_collectives, rows_entries, rows_experts, rows_fused, rows_pointwise, rows_reductions,
    rows_rounded, rows_sparse, rows_states, rows_tokens, rows_views,
)  # fmt: skip


def lookup(name: str, version: int = 1) -> OpDef | None:
    """The op's row, or None when the table has no such op or version."""
    return _table().get((name, version))


def names() -> tuple[tuple[str, int], ...]:
    """All (name, version) pairs of the table, sorted."""
    return tuple(sorted(_table()))


def signature(name: str, version: int = 1) -> str:
    """The op's signature in the schema language of `torch.library`; without the namespace, if that is ours.

    Raises KeyError for a name or version that the table doesn't have.
    """
    return name.removeprefix("precast.") + _table()[name, version].signature


@cache
def _table() -> dict[tuple[str, int], OpDef]:
    rows = [row for file in _ROW_FILES for row in file.ROWS]
    table = {(row.name, row.version): row for row in rows}
    assert len(table) == len(rows), "two rows for one version of an op"
    return table
