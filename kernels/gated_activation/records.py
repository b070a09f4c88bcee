"""What computes gated activations: the reference, everywhere."""

from __future__ import annotations

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import mul, numel
from precast.kernels.records import reference
from precast.kernels.use import Use, copied, wide, width


def _gated_activation(use: Use) -> Expr:
    """The wide copy of both halves, the activated gate, the product before it is rounded."""
    x = use.operands["x"]
    total = 2 * copied(x) + 2 * wide(x)
    return mul(total - width(x), numel(use.result.shape))


RECORDS = (reference("precast.gated_activation", "gated_activation.gated_activation", _gated_activation),)
