"""Records of torch's own ops: one each, on all devices, under the names of the op table."""

from __future__ import annotations

from collections.abc import Callable

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, mul
from precast.ir.ops import table as ops
from precast.ir.ops.checks import COMPUTED
from precast.kernels.records import Record, nothing
from precast.kernels.use import Use, numbers, size, type_bytes, width


def _linear(use: Use) -> Expr:
    """The input without gaps."""
    given = use.operands["input"]
    return 0 if given.is_contiguous else size(given)


def _matmul(use: Use) -> Expr:
    """Both factors of batches, which may lie otherwise or be repeated."""
    result = use.result.shape
    if len(result) < 3:
        return 0
    factors = (use.operands["self"], use.operands["other"])
    return add(*(mul(width(factor), *result[:-2], *factor.type.shape[-2:]) for factor in factors))


def _sorted(use: Use) -> Expr:
    """Keys and int64 places, twice over; the rows' numbers, and a byte for counters."""
    given = use.operands["self"]
    return mul(2 * (width(given) + 8) + 9, numbers(given))


def _along_rows(use: Use) -> Expr:
    """Softmax and sums over a dimension: the argument in the result's type, without gaps."""
    given = use.operands["self"]
    as_is = given.is_contiguous and given.type.dtype == use.result.dtype
    return 0 if as_is else type_bytes(use.result)


_WORKSPACES: dict[str, Callable[[Use], Expr]] = {
    "aten.linear.default": _linear,
    "aten.matmul.default": _matmul,
    "aten.topk.default": _sorted,
    "aten.sort.default": _sorted,
    "aten.softmax.int": _along_rows,
    "aten.cumsum.default": _along_rows,
}
"""Others write their results and hold no more."""
_PRODUCTS = ("aten.linear.default", "aten.addmm.default", "aten.matmul.default")


def _record(op: str, version: int) -> Record:
    factors = ("input", "weight", "self", "other", "mat1", "mat2") if op in _PRODUCTS else ()
    return Record(
        name=f"torch.{op.removeprefix('aten.')}", op=op, op_versions=(version,), runs=f"torch:ops.{op}",
        workspace=_WORKSPACES.get(op, nothing), dtypes=dict.fromkeys(factors, COMPUTED),
    )  # fmt: skip


RECORDS = tuple(_record(name, version) for name, version in ops.names() if name.startswith("aten."))
