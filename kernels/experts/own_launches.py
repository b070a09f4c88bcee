"""The launch that counts experts from the first of a rank."""

from __future__ import annotations

from precast.ir.graph.schema import Const, Dim, Expr
from precast.ir.graph.symbols import ceildiv, mul
from precast.kernels.records import Launch, Pointer, Stride
from precast.kernels.rows import known, overlaps
from precast.kernels.use import Use

_BLOCK = 1024


def takes(use: Use) -> bool:
    """Whether integers [rows, columns], with columns of known number, are lessened by a number."""
    is_number = isinstance(use.node.args.get("other"), (Const, Dim)) and use.constant("alpha") in (None, 1)
    given = use.operands.get("self")
    shape = () if given is None else given.type.shape
    return is_number and use.dtype == "int64" and len(shape) == 2 and bool(use.number("self", 1))


def less(use: Use) -> tuple[Launch, ...]:
    """One launch of `aten.sub.Tensor`."""
    width, rows, has_pdl = known(use, "self", 1), use.shape("self")[0], overlaps(use)
    launch = Launch(
        kernel="precast.kernels.experts.own_triton:less_kernel", grid=(ceildiv(mul(width, rows), _BLOCK),),
        args=(Pointer("out.0"), Pointer("self"), _number(use), rows, Stride("self", 0), Stride("self", 1)),
        constants={"WIDTH": width, "BLOCK": _BLOCK, "PDL": has_pdl}, pdl=has_pdl,
    )  # fmt: skip
    return (launch,)


def _number(use: Use) -> Expr:
    arg = use.node.args["other"]
    if isinstance(arg, Dim):
        return arg.expr
    assert isinstance(arg, Const), "it takes the use"
    assert isinstance(arg.value, int), "of integers"
    return arg.value
