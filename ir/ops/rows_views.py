"""Ops that move elements and compute nothing. Sizes are written out: no -1, no end beyond the last element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from precast.ir.graph import symbols
from precast.ir.graph.schema import Expr, TensorType
from precast.ir.graph.symbols import shape_text
from precast.ir.ops.checks import WORLD, axis_of, broadcast, expect, expect_dtype, expect_rank, expect_shape
from precast.ir.ops.op import EACH, OVER_DIM, Args, Tokens, row
from precast.ir.ops.work import nothing


def reshape(args: Args) -> tuple[TensorType, ...]:
    x, shape = args["self"], _written_out("shape", args["shape"])
    expect(
        symbols.equal(symbols.numel(x.shape), symbols.numel(shape)),
        f"shape: {shape_text(shape)} has another number of elements than {shape_text(x.shape)}",
    )
    return (TensorType(x.dtype, shape),)


def transpose(args: Args) -> tuple[TensorType, ...]:
    x = args["self"]
    shape = list(x.shape)
    i, j = axis_of(args["dim0"], len(shape), "dim0"), axis_of(args["dim1"], len(shape), "dim1")
    shape[i], shape[j] = shape[j], shape[i]
    return (TensorType(x.dtype, tuple(shape)),)


def permute(args: Args) -> tuple[TensorType, ...]:
    x = args["self"]
    dims = [axis_of(dim, len(x.shape)) for dim in args["dims"]]
    expect(sorted(dims) == list(range(len(x.shape))), f"dims: {dims} is no permutation of {len(x.shape)} dimensions")
    return (TensorType(x.dtype, tuple(x.shape[dim] for dim in dims)),)


def unsqueeze(args: Args) -> tuple[TensorType, ...]:
    x = args["self"]
    dim = axis_of(args["dim"], len(x.shape) + 1)
    return (TensorType(x.dtype, (*x.shape[:dim], 1, *x.shape[dim:])),)


def squeeze(args: Args) -> tuple[TensorType, ...]:
    x = args["self"]
    dim = axis_of(args["dim"], len(x.shape))
    expect(x.shape[dim] == 1, f"dim {dim} of {shape_text(x.shape)} is not 1")
    return (TensorType(x.dtype, (*x.shape[:dim], *x.shape[dim + 1 :])),)


def expand(args: Args) -> tuple[TensorType, ...]:
    x, size = args["self"], _written_out("size", args["size"])
    expect_shape("self, broadcast", broadcast(x.shape, size), size)
    return (TensorType(x.dtype, size),)


def slice_(args: Args) -> tuple[TensorType, ...]:
    """torch clamps bounds and counts negative ones from the end; here they are written out and must fit.

    Bounds that depend on the world alone are checked when it is known: a load asks again.
    """
    x = args["self"]
    dim = axis_of(args["dim"], len(x.shape))
    start, end, step = args["start"], args["end"], args.get("step", 1)
    expect(isinstance(step, int) and step > 0, f"step: expected a positive constant, found {step}")
    length = symbols.add(end, symbols.mul(-1, start))
    rest = symbols.add(x.shape[dim], symbols.mul(-1, end))
    ok = not any(isinstance(value, int) and value < 0 for value in (start, end, length))
    where = f"dimension {dim} of {shape_text(x.shape)}"
    expect(
        ok and (symbols.never_negative(rest) or _is_of_world(rest)),
        f"start, end: {symbols.text(start)}:{symbols.text(end)} isn't known to lie in {where}",
    )
    count = symbols.floordiv(symbols.add(length, step - 1), step)
    return (TensorType(x.dtype, (*x.shape[:dim], count, *x.shape[dim + 1 :])),)


def _is_of_world(expr: Expr) -> bool:
    return not isinstance(expr, int) and symbols.free_symbols(expr) <= WORLD


def select(args: Args) -> tuple[TensorType, ...]:
    x, index = args["self"], args["index"]
    dim = axis_of(args["dim"], len(x.shape))
    size = x.shape[dim]
    if isinstance(size, int) and isinstance(index, int):
        expect(-size <= index < size, f"index: {index} is outside of dimension {dim} of {shape_text(x.shape)}")
    return (TensorType(x.dtype, (*x.shape[:dim], *x.shape[dim + 1 :])),)


def cat(args: Args) -> tuple[TensorType, ...]:
    parts = args["tensors"]
    expect(len(parts) > 0, "tensors: expected at least one")
    first = parts[0]
    dim = axis_of(args.get("dim", 0), len(first.shape))
    for part in parts[1:]:
        expect_rank("tensors", part, len(first.shape))
        expect_dtype("tensors", part, first.dtype)
        expect_shape("tensors before dim", part.shape[:dim], first.shape[:dim])
        expect_shape("tensors after dim", part.shape[dim + 1 :], first.shape[dim + 1 :])
    total = symbols.add(*(part.shape[dim] for part in parts))
    return (TensorType(first.dtype, (*first.shape[:dim], total, *first.shape[dim + 1 :])),)


def _written_out(name: str, shape: Sequence[Any]) -> tuple[Expr, ...]:
    known = [size for size in shape if isinstance(size, int)]
    expect(min(known, default=0) >= 0, f"{name}: sizes are written out, never {min(known, default=0)}")
    return tuple(shape)


ROWS = (
    row("aten.reshape.default(Tensor self, int[] shape) -> Tensor", reshape, Tokens("reshapes"), nothing),
    row("aten.transpose.int(Tensor self, int dim0, int dim1) -> Tensor", transpose, EACH, nothing),
    row("aten.permute.default(Tensor self, int[] dims) -> Tensor", permute, EACH, nothing),
    row("aten.unsqueeze.default(Tensor self, int dim) -> Tensor", unsqueeze, EACH, nothing),
    row("aten.squeeze.dim(Tensor self, int dim) -> Tensor", squeeze, EACH, nothing),
    row("aten.expand.default(Tensor self, int[] size) -> Tensor", expand, EACH, nothing),
    row(
        "aten.slice.Tensor(Tensor self, int dim, int start, int end, int step=1) -> Tensor",
        slice_,
        Tokens("cuts", "dim"),
        nothing,
    ),
    row("aten.select.int(Tensor self, int dim, int index) -> Tensor", select, OVER_DIM, nothing),
    row("aten.cat.default(Tensor[] tensors, int dim=0) -> Tensor", cat, OVER_DIM, nothing),
)
