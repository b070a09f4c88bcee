"""Ops along dimensions: sums, orders, the largest, and elements that indices name."""

from __future__ import annotations

from precast.ir.graph.schema import Expr, TensorType
from precast.ir.ops.checks import (
    COMPUTED,
    COUNTS,
    FLOATS,
    INTEGERS,
    axis_of,
    expect,
    expect_dtype,
    expect_rank,
    expect_shape,
)
from precast.ir.ops.op import OVER_DIM, Args, Integers, row
from precast.ir.ops.work import nothing, reduction


def mean(args: Args) -> tuple[TensorType, ...]:
    expect_dtype("self", args["self"], *COMPUTED)
    return (_reduced(args, args["self"].dtype),)


def sum_(args: Args) -> tuple[TensorType, ...]:
    dtype = args["self"].dtype
    expect_dtype("self", args["self"], *INTEGERS, *COMPUTED)
    return (_reduced(args, dtype if dtype in FLOATS else "int64"),)


def softmax(args: Args) -> tuple[TensorType, ...]:
    x = args["self"]
    axis_of(args["dim"], len(x.shape))
    result = TensorType(args.get("dtype") or x.dtype, x.shape)
    expect_dtype("dtype, or self", result, *COMPUTED)
    return (result,)


def cumsum(args: Args) -> tuple[TensorType, ...]:
    x = args["self"]
    axis_of(args["dim"], len(x.shape))
    wanted = args.get("dtype") or (x.dtype if x.dtype in FLOATS else "int64")
    result = TensorType(wanted, x.shape)  # type: ignore[arg-type]
    expect_dtype("self", x, *INTEGERS, *COMPUTED)
    expect_dtype("dtype, or self", result, *COMPUTED, *COUNTS)
    return (result,)


def topk(args: Args) -> tuple[TensorType, ...]:
    x, k = args["self"], args["k"]
    expect_dtype("self", x, *COMPUTED)
    expect(len(x.shape) > 0, "self: expected at least one dimension")
    dim = axis_of(args.get("dim", -1), len(x.shape))
    size = x.shape[dim]
    expect(isinstance(k, int) and k >= 0, f"k: expected a count, found {k}")
    expect(not isinstance(size, int) or k <= size, f"k: expected at most {size}, found {k}")
    shape = (*x.shape[:dim], k, *x.shape[dim + 1 :])
    return (TensorType(x.dtype, shape), TensorType("int64", shape))


def sort(args: Args) -> tuple[TensorType, ...]:
    x = args["self"]
    expect_dtype("self", x, *INTEGERS, *COMPUTED)
    axis_of(args.get("dim", -1), len(x.shape))
    return (x, TensorType("int64", x.shape))


def max_dim(args: Args) -> tuple[TensorType, ...]:
    values = _over_one(args)
    return (values, TensorType("int64", values.shape))


def argmax(args: Args) -> tuple[TensorType, ...]:
    return (TensorType("int64", _over_one(args).shape),)


def gather(args: Args) -> tuple[TensorType, ...]:
    x, index = args["self"], args["index"]
    _along(x, args["dim"], index)
    return (TensorType(x.dtype, index.shape),)


def scatter_src(args: Args) -> tuple[TensorType, ...]:
    x, index, src = args["self"], args["index"], args["src"]
    dim = _along(x, args["dim"], index)
    expect_dtype("src", src, x.dtype)
    expect_rank("src", src, len(index.shape))
    for axis, (found, needed) in enumerate(zip(src.shape, index.shape, strict=True)):
        _at_most("index", axis, needed, found)
        if axis != dim:
            _at_most("index", axis, needed, x.shape[axis])
    return (x,)


def scatter_value(args: Args) -> tuple[TensorType, ...]:
    _along(args["self"], args["dim"], args["index"])
    return (args["self"],)


def _reduced(args: Args, dtype: str) -> TensorType:
    x = args["self"]
    dims = [axis_of(dim, len(x.shape)) for dim in args["dim"]]
    expect(0 < len(set(dims)) == len(dims), f"dim: expected different dimensions, at least one, found {dims}")
    kept = bool(args.get("keepdim"))
    shape = tuple(1 if i in dims else size for i, size in enumerate(x.shape) if kept or i not in dims)
    return TensorType(dtype, shape)  # type: ignore[arg-type]


def _over_one(args: Args) -> TensorType:
    """Over one dimension, which isn't empty: the largest of nothing is nothing."""
    x = args["self"]
    expect_dtype("self", x, *COMPUTED, *COUNTS)
    expect(len(x.shape) > 0, "self: expected at least one dimension")
    dim = axis_of(args["dim"], len(x.shape))
    expect(x.shape[dim] != 0, f"dim: dimension {dim} has no elements")
    kept = (1,) if args.get("keepdim") else ()
    return TensorType(x.dtype, (*x.shape[:dim], *kept, *x.shape[dim + 1 :]))


def _along(x: TensorType, dim: object, index: TensorType) -> int:
    """The dimension in which `index` names elements of `x`; it has no more than `x` in the others."""
    expect_dtype("index", index, "int64")
    expect_dtype("self", x, *INTEGERS, *COMPUTED)
    expect(len(x.shape) > 0, "self: expected at least one dimension")
    expect_rank("index", index, len(x.shape))
    axis = axis_of(dim, len(x.shape))
    for other, (found, most) in enumerate(zip(index.shape, x.shape, strict=True)):
        if other != axis:
            _at_most("index", other, found, most)
    return axis


def _at_most(name: str, axis: int, found: Expr, most: Expr) -> None:
    if isinstance(found, int) and isinstance(most, int):
        expect(found <= most, f"{name}: expected at most {most} in dimension {axis}, found {found}")
    else:
        expect_shape(f"{name}'s dimension {axis}", (found,), (most,))


_ALONG = {"index": Integers("index", "self", "dim")}

ROWS = (
    row("aten.mean.dim(Tensor self, int[] dim, bool keepdim=False) -> Tensor", mean, OVER_DIM, reduction),
    row("aten.sum.dim_IntList(Tensor self, int[] dim, bool keepdim=False) -> Tensor", sum_, OVER_DIM, reduction),
    row("aten.softmax.int(Tensor self, int dim, Dtype dtype=None) -> Tensor", softmax, OVER_DIM),
    row("aten.cumsum.default(Tensor self, int dim, *, Dtype dtype=None) -> Tensor", cumsum, OVER_DIM, reduction),
    row(
        "aten.topk.default(Tensor self, int k, int dim=-1, bool largest=True, bool sorted=True) -> (Tensor, Tensor)",
        topk,
        OVER_DIM,
    ),
    row("aten.sort.default(Tensor self, int dim=-1, bool descending=False) -> (Tensor, Tensor)", sort, OVER_DIM),
    row("aten.max.dim(Tensor self, int dim, bool keepdim=False) -> (Tensor, Tensor)", max_dim, OVER_DIM),
    row("aten.argmax.default(Tensor self, int dim, bool keepdim=False) -> Tensor", argmax, OVER_DIM),
    row(
        "aten.gather.default(Tensor self, int dim, Tensor index) -> Tensor", gather, OVER_DIM, nothing, integers=_ALONG
    ),
    row(
        "aten.scatter.src(Tensor self, int dim, Tensor index, Tensor src) -> Tensor",
        scatter_src,
        OVER_DIM,
        integers=_ALONG,
    ),
    row(
        "aten.scatter.value(Tensor self, int dim, Tensor index, Scalar value) -> Tensor",
        scatter_value,
        OVER_DIM,
        integers=_ALONG,
    ),
)
