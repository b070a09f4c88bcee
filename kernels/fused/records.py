"""What computes fused ops: a Triton kernel on GPUs, the steps one by one elsewhere."""

from __future__ import annotations

from precast.ir.graph.infer import references
from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, largest
from precast.kernels.fused.launches import MAX_AXES, MAX_ROW, is_row_wise, launches, space_of, steps_of
from precast.kernels.records import Condition, Record, nothing, reference
from precast.kernels.use import Use, type_bytes


def _one_by_one(use: Use) -> Expr:
    """What the steps hold at once at most, but for the results: each until its last use."""
    steps, types = steps_of(use)
    last_use = {name: i for i, step in enumerate(steps.steps) for name in references(step.args)}
    held: dict[str, Expr] = {}
    sums: list[Expr] = [0]
    for i in range(len(steps.steps)):
        held[f"s{i}"] = type_bytes(types[f"s{i}"])
        sums.append(add(*held.values()))
        held = {name: size for name, size in held.items() if last_use.get(name, -1) > i or name in steps.results}
    return largest(sums)


def _few_axes(use: Use) -> bool:
    return len(space_of(steps_of(use)[1]).sizes) <= MAX_AXES


def _whole_rows_fit(use: Use) -> bool:
    steps, types = steps_of(use)
    columns = space_of(types).columns
    return columns != 0 and (not is_row_wise(steps) or (isinstance(columns, int) and columns <= MAX_ROW))


def _no_float64(use: Use) -> bool:
    return all(kind.dtype != "float64" for kind in steps_of(use)[1].values())


RECORDS = (
    Record(
        name="triton.fused", op="precast.fused", runs=launches, workspace=nothing, kind="triton", devices=("cuda",),
        min_capability=(8, 0), allocates=False, takes=(
            Condition(f"at most {MAX_AXES} leading axes", _few_axes),
            Condition(f"at most {MAX_ROW} columns in rows that are summed", _whole_rows_fit),
            Condition("no float64", _no_float64),
        ),
    ),
    reference("precast.fused", "fused.fused", _one_by_one),
)  # fmt: skip
