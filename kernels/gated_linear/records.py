"""What computes gated linear layers: for few rows the weight stream, which gates what it multiplied; else two launches
a part of the rows, or the reference."""

from __future__ import annotations

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, minimum, mul, numel
from precast.kernels.gated_linear.limits import MAX_ROWS_AT_ONCE
from precast.kernels.linear.records import streamed
from precast.kernels.records import Condition, Record, reference
from precast.kernels.rows import COMPUTED
from precast.kernels.use import Use, copied, size, wide, width


def _input(use: Use) -> Expr:
    """The input without gaps."""
    given = use.operands["input"]
    return 0 if given.is_contiguous else size(given)


def _at_once(use: Use) -> Expr:
    """The products of as many rows as are gated at once."""
    rows = minimum(numel(use.shape("input")[:-1]), MAX_ROWS_AT_ONCE)
    return add(mul(use.width("input"), rows, use.shape("weight")[0]), _input(use))


def _reference(use: Use) -> Expr:
    """The product, its wide copy, the activated gate, the gated product before it is rounded."""
    given = use.operands["input"]
    total = 2 * width(given) + 2 * copied(given) + 2 * wide(given)
    return add(mul(total - width(given), numel(use.result.shape)), _input(use))


_KNOWN = Condition("outputs whose number is known at load", lambda use: bool(use.number("weight", 0)))

RECORDS = (
    streamed("cuda.gated_linear", "precast.gated_linear", "T", "tokens"),
    Record(
        name="triton.gated_linear", op="precast.gated_linear", kind="triton", devices=("cuda",), min_capability=(8, 0),
        dtypes=dict.fromkeys(("input", "weight", "bias"), COMPUTED), takes=(_KNOWN,), allocates=False,
        workspace=_at_once, runs="precast.kernels.gated_linear.rows_at_once:gated_linear",
    ),
    reference("precast.gated_linear", "gated_linear.gated_linear", _reference),
)  # fmt: skip
