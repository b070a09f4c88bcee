"""What computes rms norms: Triton on GPUs, the references elsewhere and for what Triton does not take."""

from __future__ import annotations

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, mul, numel
from precast.kernels.records import Record, reference
from precast.kernels.rms_norm import launches
from precast.kernels.rows import HAS_SHORT_ROWS, in_triton
from precast.kernels.use import Use, copied, numbers, size, wide, width


def _triton(op: str) -> Record:
    return in_triton(f"precast.{op}", launches.rms_norm, ("x", "inner_weight", "weight"), HAS_SHORT_ROWS)


def rms_norm_workspace(use: Use) -> Expr:
    """The wide copy, the normed rows, and what weight and rounding make of them."""
    x, weight = use.operands["x"], use.operands.get("weight")
    full, narrow, copy = wide(x), width(x), copied(x)
    rounded = narrow if copy else 0
    if weight is None:
        total = copy + full + rounded
    elif use.constant("cast_before_scale"):
        product = max(narrow, width(weight))
        total = copy + full + rounded + product + (narrow if product > narrow else 0)
    else:
        total = copy + 2 * full + rounded
    rows = mul(3 * full, numel(x.type.shape[:-1]))
    gaps: Expr = 0 if x.is_contiguous else size(x)
    scale: Expr = 0 if weight is None else mul(2 * full, numbers(weight))
    return add(mul(max(total, copy + full) - narrow, numbers(x)), rows, gaps, scale)


def _norm_residual_norm(use: Use) -> Expr:
    """What each norm holds beside its result, and the first one's result."""
    return add(rms_norm_workspace(use), size(use.operands["x"]))


RECORDS = (
    _triton("rms_norm"),
    reference("precast.rms_norm", "rms_norm.rms_norm", rms_norm_workspace),
    _triton("residual_rms_norm"),
    reference("precast.residual_rms_norm", "rms_norm.residual_rms_norm", rms_norm_workspace),
    _triton("norm_residual_norm"),
    reference("precast.norm_residual_norm", "rms_norm.norm_residual_norm", _norm_residual_norm),
)
