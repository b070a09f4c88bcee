"""What computes Sinkhorn's iterations: Triton on GPUs, else the definition."""

from __future__ import annotations

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, mul, numel
from precast.kernels.records import reference
from precast.kernels.rows import HAS_ROWS, in_triton
from precast.kernels.sinkhorn import launches
from precast.kernels.use import Use, wide


def _sinkhorn(use: Use) -> Expr:
    """The wide copy, two results of a division, and sums of rows."""
    x = use.operands["x"]
    return add(mul(4 * wide(x), numel(use.result.shape)), 4096)


RECORDS = (
    in_triton("precast.sinkhorn", launches.sinkhorn, ("x",), HAS_ROWS, launches.IS_SMALL),
    reference("precast.sinkhorn", "sinkhorn.sinkhorn", _sinkhorn),
)
