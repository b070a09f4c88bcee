"""What computes collectives: the group that a program is given. Which kernels it launches is its own affair."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add
from precast.kernels.records import Record, nothing, reference, reference_on_cpu
from precast.kernels.rms_norm.records import rms_norm_workspace
from precast.kernels.rows import COMPUTED, HAS_SHORT_ROWS
from precast.kernels.use import Use, size, type_bytes


def _gathered(use: Use) -> Expr:
    """What the ranks give, one after another, before it is put in order."""
    return type_bytes(use.result)


def _scattered(use: Use) -> Expr:
    """The copy in which each rank's part is contiguous."""
    return size(use.operands["x"])


def _summed(use: Use) -> Expr:
    """The sum, where the group does not norm it at once."""
    return size(use.operands["x"])


def _summed_and_normed(use: Use) -> Expr:
    """The sum, and what its norm holds."""
    return add(_summed(use), rms_norm_workspace(use))


def _records(name: str, workspace: Callable[[Use], Expr]) -> tuple[Record, ...]:
    """Ranks on CPUs meet while the host runs: no recording of what torch does holds that."""
    module, op = "collectives.collectives", f"precast.{name}"
    into = Record(
        name=f"torch.{name}", op=op, runs=f"precast.kernels.{module}:{name}_into", workspace=workspace, allocates=False,
        devices=("cuda",), kind="group",
    )  # fmt: skip
    by_host = msgspec.structs.replace(
        into, name=f"torch.{name}_by_host", devices=("cpu",), control="host", kind="torch"
    )
    return into, by_host, msgspec.structs.replace(reference(op, module, workspace), devices=("cuda",))


def _between_stages() -> Iterator[Record]:
    for name, path in (("send", "send"), ("receive", "receive_into")):
        into = Record(
            name=f"torch.{name}", op=f"precast.{name}", runs=f"precast.kernels.collectives.collectives:{path}",
            workspace=nothing, allocates=False, devices=("cuda",),
        )  # fmt: skip
        yield into
        yield msgspec.structs.replace(into, name=f"torch.{name}_by_host", devices=("cpu",), control="host")
        yield reference_on_cpu(f"precast.{name}", "collectives.collectives")


_NORM = reference(
    "precast.all_reduce_residual_rms_norm", "collectives.all_reduce_norm", _summed_and_normed
)  # fmt: skip
_NORM_INTO = Record(
    name="triton.all_reduce_residual_rms_norm", op=_NORM.op, kind="group", devices=("cuda",), min_capability=(8, 0),
    runs=f"{_NORM.runs}_into", dtypes=dict.fromkeys(("x", "weight"), COMPUTED), takes=(HAS_SHORT_ROWS,),
    workspace=_summed, allocates=False,
)  # fmt: skip
_NORM_BY_HOST = msgspec.structs.replace(
    _NORM, name="reference.all_reduce_residual_rms_norm_by_host", devices=("cpu",), control="host"
)

RECORDS = (
    *_between_stages(),
    *_records("all_reduce", nothing),
    *_records("all_gather", _gathered),
    *_records("reduce_scatter", _scattered),
    _NORM_INTO,
    _NORM_BY_HOST,
    msgspec.structs.replace(_NORM, devices=("cuda",)),
)
