"""What computes linear layers whose weights are in few bits."""

from __future__ import annotations

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, mul, numel
from precast.kernels.records import reference
from precast.kernels.use import Use, numbers


def _dequantised(use: Use) -> Expr:
    """Values that are unpacked, scaled and rounded, some of these side by side; and copies of the input."""
    format = str(use.constant("format"))
    value = 24 if "fp4" in format else 8 if format in ("fp8", "int8") else 12
    value += 4 if use.has("zeros") else 0
    copies = 0 if use.constant("activation") in (None, "none") else 20
    values, results = mul(use.result.shape[-1], use.shape("input")[-1]), mul(copies // 5, numel(use.result.shape))
    return add(mul(value, values), mul(copies, numbers(use.operands["input"])), results)


RECORDS = (reference("precast.quantised_linear", "quantised_linear.quantised_linear", _dequantised),)
