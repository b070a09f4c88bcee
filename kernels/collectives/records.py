"""What computes collectives: the group that a program is given. Which kernels it launches is its own affair."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from precast.ir.graph.schema import Expr
from precast.kernels.records import Record, nothing, reference
from precast.kernels.use import Use, size, type_bytes


def _gathered(use: Use) -> Expr:
    """What the ranks give, one after another, before it is put in order."""
    return type_bytes(use.result)


def _scattered(use: Use) -> Expr:
    """The copy in which each rank's part is contiguous."""
    return size(use.operands["x"])


def _records(name: str, workspace: Callable[[Use], Expr]) -> tuple[Record, ...]:
    """Ranks on CPUs meet while the host runs: no recording of what torch does holds that."""
    module, op = "collectives.collectives", f"precast.{name}"
    into = Record(
        name=f"torch.{name}", op=op, runs=f"precast.kernels.{module}:{name}_into", workspace=workspace, allocates=False,
        devices=("cuda",),
    )  # fmt: skip
    by_host = msgspec.structs.replace(into, name=f"torch.{name}_by_host", devices=("cpu",), control="host")
    return into, by_host, msgspec.structs.replace(reference(op, module, workspace), devices=("cuda",))


RECORDS = (
    *_records("all_reduce", nothing),
    *_records("all_gather", _gathered),
    *_records("reduce_scatter", _scattered),
)
