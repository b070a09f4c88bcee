"""What shape rules are written with: checks that say what was expected and found, broadcasting, torch's promotion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from precast.ir.graph import symbols
from precast.ir.graph.schema import Dtype, Expr, TensorType
from precast.ir.graph.symbols import shape_text
from precast.ir.ops.op import Args, ShapeError

COMPUTED: tuple[Dtype, ...] = ("float16", "bfloat16", "float32", "float64")
INTEGERS: tuple[Dtype, ...] = ("bool", "int8", "uint8", "int32", "int64")
WORLD = frozenset(("rank", "tp", "ep"))
"""The symbols that have their values from where a load puts the model (`docs/format/v1.md`, Symbols)."""
COUNTS = tuple(name for name in INTEGERS if name != "bool")
FLOATS: tuple[Dtype, ...] = ("float8_e4m3fn", *COMPUTED)
_RANK = {"bool": 0, "uint8": 1, "int8": 1, "int32": 2, "int64": 3,
         "float8_e4m3fn": 4, "float16": 5, "bfloat16": 5, "float32": 6, "float64": 7}  # fmt: skip


def expect(ok: bool, message: str) -> None:
    """Raise `ShapeError` unless this holds."""
    if not ok:
        raise ShapeError(message)


def expect_shape(name: str, found: Sequence[Expr], expected: Sequence[Expr]) -> None:
    """The sizes are equal, as expressions."""
    ok = len(found) == len(expected) and all(symbols.equal(a, b) for a, b in zip(found, expected, strict=True))
    expect(ok, f"{name}: expected shape {shape_text(expected)}, found {shape_text(found)}")


def expect_rank(name: str, tensor: TensorType, rank: int) -> None:
    """The tensor has so many dimensions."""
    expect(len(tensor.shape) == rank, f"{name}: expected {rank} dimensions, found {shape_text(tensor.shape)}")


def expect_dtype(name: str, tensor: TensorType, *allowed: str) -> None:
    """The tensor's dtype is one of these."""
    expect(tensor.dtype in allowed, f"{name}: expected dtype {' or '.join(allowed)}, found {tensor.dtype}")


def expect_floating(name: str, tensor: TensorType, shape: Sequence[Expr]) -> None:
    """A tensor of this shape, of a type that ops compute in."""
    expect_shape(name, tensor.shape, shape)
    expect_dtype(name, tensor, *COMPUTED)


def expect_given(args: Args, name: str, shape: Sequence[Expr], *dtypes: str) -> None:
    """The optional tensor, if it is given, is of this shape and one of these dtypes."""
    if args.get(name) is not None:
        expect_shape(name, args[name].shape, shape)
        expect_dtype(name, args[name], *dtypes)


def expect_vector(name: str, tensor: TensorType, dtype: str) -> None:
    """A tensor of one dimension, of any size."""
    expect_rank(name, tensor, 1)
    expect_dtype(name, tensor, dtype)


def expect_tokens(name: str, tensor: TensorType, rank: int) -> None:
    """Packed tokens [1, T, ...] of `rank` dimensions, of a type that ops compute in."""
    expect_rank(name, tensor, rank)
    expect_shape(f"{name}'s first dimension", tensor.shape[:1], (1,))
    expect_dtype(name, tensor, *COMPUTED)


def expect_known(name: str, *sizes: Expr) -> None:
    """Sizes that don't depend on a step: integers, once the model is placed."""
    for size in sizes:
        known = symbols.free_symbols(size) <= WORLD
        expect(known, f"{name}: expected a size that is the same in every step, found {symbols.text(size)}")


def expect_one_of(name: str, value: Any, allowed: Sequence[str]) -> None:
    """A word of these."""
    expect(value in allowed, f"{name}: expected one of {', '.join(allowed)}, found {value!r}")


def expect_positive(args: Args, name: str) -> None:
    """The argument is None or a constant of at least 1."""
    value = args.get(name)
    ok = value is None or (isinstance(value, int) and value > 0)
    expect(ok, f"{name}: expected None or at least 1, found {value}")


def axis_of(dim: Any, rank: int, name: str = "dim") -> int:
    """The dimension that `dim` names, counted from the front."""
    expect(isinstance(dim, int) and -rank <= dim < rank, f"{name}: {dim} is outside of {rank} dimensions")
    return int(dim) % rank


def broadcast(*shapes: Sequence[Expr]) -> tuple[Expr, ...]:
    """The common shape of tensors that are combined element by element."""
    out: list[Expr] = []
    for axis in range(1, max(len(s) for s in shapes) + 1):
        size: Expr = 1
        for shape in shapes:
            if axis > len(shape) or shape[-axis] == 1:
                continue
            expect(
                size == 1 or symbols.equal(size, shape[-axis]),
                f"shapes {', '.join(map(shape_text, shapes))} don't broadcast",
            )
            size = shape[-axis]
        out.append(size)
    return tuple(reversed(out))


def promoted(operands: Sequence[Any]) -> str:
    """The dtype in which torch combines tensors and numbers.

    Tensors with dimensions decide; zero-dim tensors, then numbers, count only if they are of a higher category
    (bool, integer, floating). A number that is no tensor is an int64 or a float32.
    """
    dims, zero_dim, number = "", "", ""
    for operand in operands:
        if not isinstance(operand, TensorType):
            dtype = "bool" if isinstance(operand, bool) else "float32" if isinstance(operand, float) else "int64"
            number = _wider(number, dtype)
        elif operand.shape:
            dims = _wider(dims, operand.dtype)
        else:
            zero_dim = _wider(zero_dim, operand.dtype)
    best = zero_dim if _category(zero_dim) > _category(dims) else dims
    return number if _category(number) > _category(best) else best


def _wider(best: str, dtype: str) -> str:
    pair = {best, dtype}
    expect(pair != {"int8", "uint8"}, "int8 and uint8 combine to int16, which is no element type here")
    expect("float8_e4m3fn" not in pair, "float8_e4m3fn is for storage: cast it first")
    if pair == {"float16", "bfloat16"}:
        return "float32"
    return dtype if not best or _RANK[dtype] > _RANK[best] else best


def _category(dtype: str) -> int:
    return 3 if dtype in FLOATS else 0 if not dtype else 1 if dtype == "bool" else 2
