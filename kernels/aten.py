"""Records of torch's own ops, on all devices, under the names of the op table."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, mul
from precast.ir.memory.addresses import VIEWS
from precast.ir.ops import table as ops
from precast.ir.ops.checks import COMPUTED
from precast.kernels.records import Condition, Record, nothing
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


_OUT_FORMS = {
    "aten.pow.Tensor_Scalar": "Tensor_Scalar_out", "aten.scatter.src": "src_out", "aten.scatter.value": "value_out",
    "aten.bitwise_xor.Tensor": "Tensor_out", "aten.remainder.Tensor": "Tensor_out",
    "aten.softmax.int": "int_out", "aten.sum.dim_IntList": "IntList_out", "aten.where.self": "self_out",
    **{
        f"aten.{name}.{kind}": f"{kind}_out"
        for name in ("eq", "ne", "ge", "gt", "le", "lt") for kind in ("Scalar", "Tensor")
    },
    **{
        f"aten.{name}": "out"
        for name in (
            "abs.default", "add.Tensor", "addmm.default", "argmax.default", "bitwise_not.default", "cat.default",
            "clamp.default", "cos.default", "cumsum.default", "div.Tensor", "exp.default", "expm1.default",
            "floor.default", "gather.default", "gelu.default", "log.default", "log1p.default", "logical_not.default",
            "matmul.default", "maximum.default", "mean.dim", "minimum.default", "mul.Tensor", "neg.default",
            "rsqrt.default", "sigmoid.default", "silu.default", "sin.default", "softplus.default", "sqrt.default",
            "sub.Tensor", "tanh.default",
        )
    },
}  # fmt: skip
"""The overload of an op that computes straight into `out`; others of that kind copy, or don't exist."""
_INTO = {
    "aten.full_like.default": "full_like",
    "aten.linear.default": "linear",
    "aten.relu.default": "relu",
    "aten.to.dtype": "to_dtype",
}
"""Functions of `precast.kernels.aten_into` that do, in the place of an overload."""
ANOTHER_DTYPE = Condition(
    "another dtype than the tensor has", lambda use: use.operands["self"].type.dtype != use.result.dtype
)
_SAME_DTYPE = Condition("the dtype that the tensor has", lambda use: not ANOTHER_DTYPE.holds(use))


def _records(op: str, version: int) -> list[Record]:
    """What computes an op of torch's: into `out` where it can."""
    factors = ("input", "weight", "self", "other", "mat1", "mat2") if op in _PRODUCTS else ()
    as_it_is = Record(
        name=f"torch.{op.removeprefix('aten.')}", op=op, op_versions=(version,), runs=f"torch:ops.{op}",
        workspace=_WORKSPACES.get(op, nothing), dtypes=dict.fromkeys(factors, COMPUTED),
    )  # fmt: skip
    packet = op.rpartition(".")[0]
    if op in _OUT_FORMS:
        return [replace(as_it_is, runs=f"torch:ops.{packet}.{_OUT_FORMS[op]}", allocates=False)]
    if op not in _INTO:
        return [replace(as_it_is, kind="view")] if op in VIEWS else [as_it_is]
    into = replace(as_it_is, runs=f"precast.kernels.aten_into:{_INTO[op]}", allocates=False)
    if op == "aten.to.dtype":  # a tensor that has the dtype is its own result
        return [
            replace(into, name="torch.convert", takes=(ANOTHER_DTYPE,)),
            replace(as_it_is, kind="view", takes=(_SAME_DTYPE,)),
        ]
    return [into]


RECORDS = tuple(record for op, version in ops.names() if op.startswith("aten.") for record in _records(op, version))
