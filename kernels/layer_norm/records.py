"""What computes layer norms: Triton on GPUs, the reference elsewhere and for what Triton does not take."""

from __future__ import annotations

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, mul, numel
from precast.kernels.layer_norm import launches
from precast.kernels.records import reference
from precast.kernels.rows import HAS_SHORT_ROWS, in_triton
from precast.kernels.use import Use, copied, numbers, wide, width


def _layer_norm(use: Use) -> Expr:
    """The wide copy, the centred rows, and two products at a time."""
    x = use.operands["x"]
    full, narrow, copy = wide(x), width(x), copied(x)
    products = 2 if use.has("weight") or use.has("bias") else 1
    rows = mul(4 * full, numel(x.type.shape[:-1]))
    return add(mul(copy + (1 + products) * full - narrow, numbers(x)), rows, mul(full, x.type.shape[-1]))


RECORDS = (
    in_triton("precast.layer_norm", launches.layer_norm, ("x", "weight", "bias"), HAS_SHORT_ROWS),
    reference("precast.layer_norm", "layer_norm.layer_norm", _layer_norm),
)
