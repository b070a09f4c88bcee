"""What computes torch's own ops where torch is not installed. Where it is, these stand behind its own functions, which
are as fast."""

from __future__ import annotations

from msgspec.structs import replace

from precast.ir.ops.rows_fused import REDUCTIONS
from precast.kernels.aten import ANOTHER_DTYPE
from precast.kernels.linear.records import any_rows
from precast.kernels.records import Condition, Launches, Record, nothing
from precast.kernels.rows import COMPUTED
from precast.kernels.without_torch import arithmetic, copies, products, rows


def _triton(op: str, runs: Launches, *takes: Condition) -> Record:
    return Record(
        name=f"triton.{op.removeprefix('aten.')}", op=op, kind="triton", devices=("cuda",), min_capability=(8, 0),
        allocates=False, workspace=nothing, runs=runs, takes=takes,
    )  # fmt: skip


_POINTWISE = Condition("arguments that the kernel of fused ops has", arithmetic.is_pointwise)
_ALONG = Condition("one dimension of known size to sum, and few others", arithmetic.is_along_dimension)
_AXES = Condition(f"at most {copies.MAX_AXES} axes before the last", copies.has_few_axes)
_ALL_ROWS = Condition("elements of each row, along the last dimension", rows.takes_all_rows)
_NUMBERS = Condition("rows of numbers, along the last dimension", rows.has_rows_of_numbers)
_FEW = Condition("few of rows of numbers, along the last dimension", rows.has_few_of_rows)
_MATRICES = Condition(f"matrices on at most {products.MAX_AXES} axes", products.has_matrices)

RECORDS = (
    *(
        _triton(op, arithmetic.pointwise, *([ANOTHER_DTYPE] if op == "aten.to.dtype" else []), _POINTWISE)
        for op in arithmetic.OPS
    ),
    *(_triton(op, arithmetic.along_dimension, _ALONG) for op in REDUCTIONS),
    _triton("aten.cat.default", copies.joined, _AXES),
    _triton("aten.gather.default", rows.gather, _ALL_ROWS),
    _triton("aten.softmax.int", rows.softmax, _NUMBERS),
    _triton("aten.topk.default", rows.topk, _FEW),
    replace(
        _triton("aten.matmul.default", products.matmul, _MATRICES),
        dtypes=dict.fromkeys(("self", "other"), COMPUTED),
    ),
    any_rows("cublaslt.linear_of_any_rows"),
)
