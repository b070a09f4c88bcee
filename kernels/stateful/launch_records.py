"""Makes the records of both forms of an op with a state from the launches that compute them, which read no host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precast.ir.graph.schema import Expr
from precast.ir.ops import table as ops
from precast.kernels.records import Launches, Record, nothing
from precast.kernels.use import Use


def launch_records(
    name: str, runs: Launches, *, variant: str = "", workspace: Callable[[Use], Expr] = nothing, **more: Any
) -> tuple[Record, Record]:
    """The records of `precast.stateful_<name>` and `precast.<name>` in Triton; `more` are other fields of theirs.

    They compute in float32, and so take no float64. Without a cache no state is given, and none is kept.
    """
    stateful, fresh = (_record(form, runs, variant, workspace, more) for form in (f"stateful_{name}", name))
    return stateful, fresh


def _record(form: str, runs: Launches, variant: str, workspace: Callable[[Use], Expr], more: dict[str, Any]) -> Record:
    op = ops.lookup(f"precast.{form}")
    assert op is not None
    tensors = [arg.name for arg in op.args if arg.kind.startswith("Tensor") and arg.name not in op.integers]
    return Record(
        name=f"triton.{form}{variant}", op=op.name, kind="triton", devices=("cuda",), min_capability=(8, 0),
        dtypes=dict.fromkeys(tensors, ("float16", "bfloat16", "float32")), allocates=False, workspace=workspace,
        runs=runs, **more,
    )  # fmt: skip
