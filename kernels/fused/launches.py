"""The launch of a fused op: how its rows and columns are divided, and its steps as the constant that the kernel reads.

The constant is JSON text, because a kernel's constants are numbers and text. It is made of verified steps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from precast.ir.graph.schema import Const, Dtype, Expr, Ref, Step, Steps, TensorType
from precast.ir.graph.symbols import ceildiv, numel
from precast.ir.limits import MAX_FUSED_RESULTS
from precast.ir.ops.checks import promoted
from precast.ir.ops.rows_fused import MAX_OPERANDS, REDUCTIONS, space, step_types
from precast.kernels.records import Launch, Pointer, Stride
from precast.kernels.use import Use

MAX_AXES = 3
"""Axes before the last whose size isn't 1, for which the kernel has strides."""

MAX_ROW = 16384
"""Columns of a row that is summed: a program holds it whole."""

_TILE = 1024
"""Elements of a program's tile, at 4 warps: 16 bytes a thread of a type of 16 bits."""

_Argument = int | float | bool
_EXPONENTS = {2: "square", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}


class _Value(NamedTuple):
    """What the kernel holds: the place among its values, and its element type."""

    place: int
    dtype: Dtype


class Space(NamedTuple):
    """The rows and columns of a fused op: its leading axes but for those of size 1, and the last one."""

    axes: tuple[int, ...]
    sizes: tuple[Expr, ...]
    columns: Expr


def steps_of(use: Use) -> tuple[Steps, dict[str, TensorType]]:
    """The steps, and the types of operands and of what the steps make, by name."""
    steps = use.node.args["steps"]
    assert isinstance(steps, Steps), "verified: steps"
    operands = {name: use.operands[name].type for i in range(MAX_OPERANDS) if (name := f"x{i}") in use.operands}
    return steps, step_types(steps, operands)


def space_of(types: Mapping[str, TensorType]) -> Space:
    """The space of operands and steps of these types."""
    full = space(types.values())
    axes = tuple(axis for axis, size in enumerate(full[:-1]) if size != 1)
    return Space(axes, tuple(full[axis] for axis in axes), full[-1] if full else 1)


def is_row_wise(steps: Steps) -> bool:
    """Whether rows are summed, so that a program holds them whole."""
    return any(step.op in REDUCTIONS for step in steps.steps)


def launches(use: Use) -> tuple[Launch, ...]:
    """The one launch: a tile of rows and columns for each program."""
    steps, types = steps_of(use)
    return (launch_of(steps, types, pdl=use.target.capability >= (9, 0)),)


def launch_of(
    steps: Steps, types: Mapping[str, TensorType], *, pdl: bool, given: Mapping[str, tuple[str, Sequence[int]]] = {}
) -> Launch:
    """The launch of `steps`, whose operands and what they make have these `types`.

    `given`: of operands that the launch has under another name, or with its axes in another order, that name, and the
    place of each of the operand's axes there.
    """
    where = space_of(types)
    columns, rows = tile(where.columns, whole=is_row_wise(steps))
    operands = [name for name in types if name.startswith("x")]
    rank = len(space(types.values()))
    seen = [_axes(types[name].shape, rank, where) for name in operands]
    named = [given.get(name, (name, range(rank))) for name in operands]
    pointers = [*(Pointer(name) for name, _ in named), *[None] * (MAX_OPERANDS - len(operands))]
    outs = [Pointer(f"out.{i}") for i in range(len(steps.results))]
    strides = [
        None if i >= len(operands) or (axis := seen[i][place]) is None else Stride(named[i][0], named[i][1][axis])
        for place in range(MAX_AXES + 1)
        for i in range(MAX_OPERANDS)
    ]
    sizes = [*[None] * (MAX_AXES - len(where.sizes)), *where.sizes]
    num_rows = numel(where.sizes)
    return Launch(
        "precast.kernels.fused.triton:fused_kernel",
        (ceildiv(num_rows, rows), ceildiv(where.columns, columns)),
        (*pointers, *outs, *[None] * (MAX_FUSED_RESULTS - len(outs)), *strides, *sizes, num_rows, where.columns),
        constants={"STEPS": _text(steps, types, where, seen), "ROWS": rows, "COLUMNS": columns, "PDL": pdl},
        num_warps=max(1, min(16, rows * columns // 256)),
        pdl=pdl,
    )


def tile(columns: Expr, *, whole: bool) -> tuple[int, int]:
    """Columns and rows of a program's tile, powers of two: all columns, if a row has to be `whole`."""
    width = 1 << max(columns - 1, 0).bit_length() if isinstance(columns, int) else _TILE
    width = width if whole else min(width, _TILE)
    return width, max(1, _TILE // width)


def _axes(shape: Sequence[Expr], rank: int, where: Space) -> list[int | None]:
    """Where the operand differs along the space's axes and columns, its own axis; None where it is the same for all.

    The axes of the space stand at the end of the places for them, then the columns.
    """
    missing = rank - len(shape)
    given = [axis - missing if axis >= missing and shape[axis - missing] != 1 else None for axis in where.axes]
    last = len(shape) - 1 if shape and shape[-1] != 1 else None
    return [*[None] * (MAX_AXES - len(given)), *given, last]


def _text(steps: Steps, types: Mapping[str, TensorType], where: Space, seen: Sequence[Sequence[int | None]]) -> str:
    names = [name for name in types if name.startswith("x")]
    written = _Written(len(names))
    held = {name: _Value(i, types[name].dtype) for i, name in enumerate(names)}
    for i, step in enumerate(steps.steps):
        held[f"s{i}"] = written.step(step, held, types[f"s{i}"].dtype)
    return json.dumps(
        {
            "outer": MAX_AXES - len(where.axes),
            "operands": [
                {"axes": [axis is not None for axis in axes], "dtype": types[name].dtype}
                for name, axes in zip(names, seen, strict=True)
            ],
            "steps": written.steps,
            "results": [
                {"value": held[name].place, "columns": where.columns in (1, *types[name].shape[-1:])}
                for name in steps.results
            ],
        },
        separators=(",", ":"),
    )


class _Written:
    """The kernel's steps, of which an op may have several. They are rounded as ops are; those within an op are not."""

    def __init__(self, num_operands: int) -> None:
        self._count = num_operands
        self.steps: list[dict[str, Any]] = []

    def step(self, step: Step, held: Mapping[str, _Value], dtype: Dtype) -> _Value:
        """Append what an op of the table computes, of result type `dtype`."""
        name = step.op.removeprefix("aten.").partition(".")[0]
        given: dict[str, _Value | _Argument | None] = {
            key: held[arg.name] if isinstance(arg, Ref) else arg.value  # type: ignore[misc]
            for key, arg in step.args.items()
            if isinstance(arg, (Ref, Const))
        }
        x = given.get("self")
        if name in _TWO:
            return self._add(name, x, given["other"], dtype=dtype)
        match name:
            case "to":
                return self._add("to", x, dtype=dtype)
            case "full_like":
                return self._add("to", given["fill_value"], dtype=dtype)
            case "bitwise_not" if dtype == "bool":
                return self._add("logical_not", x, dtype=dtype)
            case "rsub":
                return self._add("sub", given["other"], x, dtype=dtype)
            case "pow" if given["exponent"] == 3:
                return self._add("mul", self._add("mul", x, x, dtype=dtype), x, dtype=dtype)
            case "pow":
                return self._add(_EXPONENTS[given["exponent"]], x, dtype=dtype)  # type: ignore[index]
            case "gelu":
                return self._add("gelu_tanh" if given.get("approximate") == "tanh" else "gelu", x, dtype=dtype)
            case "clamp":
                for function, bound in (("maximum", given.get("min")), ("minimum", given.get("max"))):
                    x = x if bound is None else self._add(function, x, bound, dtype=dtype)
                assert isinstance(x, _Value)
                return x
            case "where":
                return self._choice(given["condition"], x, given["other"], dtype)
            case "masked_fill":
                return self._choice(given["mask"], given["value"], x, dtype)
            case "softplus":
                return self._softplus(x, given.get("beta", 1), given.get("threshold", 20), dtype)
        return self._add(name, x, dtype=dtype)

    def _softplus(self, x: Any, beta: Any, threshold: Any, dtype: Dtype) -> _Value:
        """log(1 + exp(beta x)) / beta, and x itself where beta x is above the threshold."""
        scaled = x if beta == 1 else self._add("mul", x, beta, dtype="float32")
        bent = self._add("log1p", self._add("exp", scaled, dtype="float32"), dtype="float32")
        if beta != 1:
            bent = self._add("div", bent, beta, dtype="float32")
        return self._choice(self._add("gt", scaled, threshold, dtype="bool"), x, bent, dtype)

    def _choice(self, condition: Any, one: Any, other: Any, dtype: Dtype) -> _Value:
        return self._add("where", one, other, dtype=dtype, condition=condition.place)

    def _add(self, name: str, *args: Any, dtype: Dtype, **more: Any) -> _Value:
        values = [arg for arg in args if arg is not None]
        self.steps.append(
            {
                "name": name,
                "args": [value.place if isinstance(value, _Value) else value for value in values],
                "is_number": [not isinstance(value, _Value) for value in values],
                "computed": _WIDENED.get(common := _common(name, values, dtype), common),
                "numbers": common if name in _COMPARISONS else _WIDENED.get(common, common),
                "dtype": dtype,
                **more,
            }
        )
        self._count += 1
        return _Value(self._count - 1, dtype)


_COMPARISONS = ("eq", "ne", "ge", "gt", "le", "lt")
_TWO = ("add", "sub", "mul", "div", "maximum", "minimum", "bitwise_xor", "remainder", *_COMPARISONS)


_WIDENED = {"bool": "int32", "float16": "float32", "bfloat16": "float32"}
"""The element types that are computed in another one. PyTorch rounds a number that it compares, and no other."""


def _common(name: str, values: Sequence[Any], dtype: Dtype) -> str:
    """The element type of what a step combines: that of its result, or of what it converts or compares."""
    if name in ("to", "logical_not"):
        return str(values[0].dtype if isinstance(values[0], _Value) else dtype)
    if name in _COMPARISONS:
        return promoted([TensorType(v.dtype, (2,)) if isinstance(v, _Value) else v for v in values])
    return dtype
