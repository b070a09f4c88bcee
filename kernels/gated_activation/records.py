"""What computes gated activations: Triton on GPUs, the reference elsewhere and for what Triton does not take."""

from __future__ import annotations

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import mul, numel
from precast.kernels.gated_activation import launches
from precast.kernels.records import reference
from precast.kernels.rows import HAS_ROWS, in_triton
from precast.kernels.use import Use, copied, wide, width


def gated_activation_workspace(use: Use) -> Expr:
    """The wide copy of both halves, the activated gate, the product before it is rounded."""
    x = use.operands["x"]
    total = 2 * copied(x) + 2 * wide(x)
    return mul(total - width(x), numel(use.result.shape))


RECORDS = (
    in_triton("precast.gated_activation", launches.gated_activation, ("x",), HAS_ROWS),
    reference("precast.gated_activation", "gated_activation.gated_activation", gated_activation_workspace),
)
