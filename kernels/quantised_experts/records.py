"""What computes experts in few bits: what the definition does, one expert after the other."""

from __future__ import annotations

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, largest, mul
from precast.kernels.quantised_experts.sizes import sizes_of
from precast.kernels.records import Record, nothing, reference_on_cpu
from precast.kernels.use import Use

_DEQUANTISED = 24
"""Bytes that are held for each number of a matrix while it is dequantised, at most: its value in float32, and two
intermediate results with their indices."""
_ROW = 6
"""Rows that are held at once beside an expert's: of the pairs, in the widest type, sorted and put back."""


def _one_by_one(use: Use) -> Expr:
    """One expert's matrix while it is dequantised, and the rows of all pairs."""
    sizes = sizes_of(use)
    matrix = mul(_DEQUANTISED, largest((mul(sizes.opened, sizes.width), mul(sizes.width, sizes.inner))))
    each = mul(_ROW * max(4, use.width("x")), largest((sizes.opened, sizes.width)))
    return add(matrix, mul(sizes.pairs, each), mul(64, sizes.pairs), mul(64, sizes.num_experts))


_RUNS = "precast.kernels.quantised_experts.one_by_one:quantised_experts"

RECORDS = (
    Record(
        name="torch.quantised_experts_of_read_groups", op="precast.quantised_experts", devices=("cuda",),
        control="host", workspace=_one_by_one, runs=_RUNS,
    ),
    Record(
        name="torch.quantised_experts_one_by_one", op="precast.quantised_experts", devices=("cpu",), control="host",
        workspace=nothing, runs=_RUNS,
    ),
    reference_on_cpu("precast.quantised_experts", "quantised_experts.quantised_experts"),
)  # fmt: skip
