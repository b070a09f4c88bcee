"""Ops over the ranks that share a layer: each rank gives its tensor, and all get what they are together.

Their argument `group` names these ranks; a program is given what connects them. With one rank they change nothing.
"""

from __future__ import annotations

from precast.ir.graph import symbols
from precast.ir.graph.schema import Expr, TensorType
from precast.ir.ops.checks import (
    COMPUTED,
    FLOATS,
    INTEGERS,
    axis_of,
    expect,
    expect_dtype,
    expect_known,
    expect_one_of,
    expect_shape,
)
from precast.ir.ops.op import EACH, OVER_DIM, Args, row
from precast.ir.ops.work import elements, nothing

GROUPS = ("tp",)
"""What a group may be: `tp`, all ranks that share a layer."""


def all_reduce(args: Args) -> tuple[TensorType, ...]:
    x = args["x"]
    expect_one_of("group", args["group"], GROUPS)
    expect_dtype("x", x, *COMPUTED)
    return (x,)


def all_gather(args: Args) -> tuple[TensorType, ...]:
    x, size = args["x"], args["size"]
    expect_dtype("x", x, *INTEGERS, *FLOATS)
    dim = _dim_and_size(args)
    return (TensorType(x.dtype, (*x.shape[:dim], symbols.mul(x.shape[dim], size), *x.shape[dim + 1 :])),)


def reduce_scatter(args: Args) -> tuple[TensorType, ...]:
    x, size = args["x"], args["size"]
    expect_dtype("x", x, *COMPUTED)
    dim = _dim_and_size(args)
    part = symbols.floordiv(x.shape[dim], size)
    if isinstance(x.shape[dim], int) and isinstance(size, int):  # else the world is not known yet: a load asks again
        expect_shape(f"x's dimension {dim}, {size} parts of it", (symbols.mul(part, size),), (x.shape[dim],))
    return (TensorType(x.dtype, (*x.shape[:dim], part, *x.shape[dim + 1 :])),)


def _dim_and_size(args: Args) -> int:
    """The dimension that is made of the ranks' parts. `size` is how many ranks there are."""
    size: Expr = args["size"]
    expect_one_of("group", args["group"], GROUPS)
    expect_known("size", size)
    expect(not isinstance(size, int) or size > 0, f"size: expected at least 1, found {size}")
    return axis_of(args["dim"], len(args["x"].shape))


ROWS = (
    row("precast.all_reduce(Tensor x, *, Group group) -> Tensor", all_reduce, EACH, elements),
    row("precast.all_gather(Tensor x, *, int dim, Group group, int size) -> Tensor", all_gather, OVER_DIM, nothing),
    row(
        "precast.reduce_scatter(Tensor x, *, int dim, Group group, int size) -> Tensor",
        reduce_scatter,
        OVER_DIM,
        elements,
    ),
)
