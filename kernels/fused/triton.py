"""The generated kernel of `precast.fused`: one Triton kernel, which walks over the op's steps while it is compiled.

The steps come as a constant, the text that `precast.kernels.fused.launches` writes: no source is made, and nothing of
a bundle is evaluated. Each program has a tile of rows and columns. An operand is read once, a step is an expression,
rounded to its type, and what the op returns is written.

Multiplications are `mul.rn`, which no compiler joins with an addition: each step rounds as the op that it stands for.
"""

# To pyright libdevice's functions are other types than kernels, triton has no knobs, static ranges are no iterables,
# and functions at compile time give constants.
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from precast.kernels.triton_chain import wait_for_previous


@triton.constexpr_function
def at(text, *path):  # type: ignore[no-untyped-def]
    """What stands at this path of the steps."""
    import json  # here, because Triton refuses functions of modules that a compiled function sees

    found = json.loads(text)
    for part in path:
        found = found[part]
    return found


@triton.constexpr_function
def count(text, *path):  # type: ignore[no-untyped-def]
    """How many items the list at this path of the steps has."""
    return len(at(text, *path))


@triton.constexpr_function
def type_at(text, *path):  # type: ignore[no-untyped-def]
    """The element type whose name stands there."""
    name = at(text, *path)
    return tl.int1 if name == "bool" else getattr(tl, name)


if triton.knobs.runtime.interpret:
    # The interpreter has no libdevice. float64 makes up for the functions that numpy has not.
    @triton.jit
    def product(a, b):  # type: ignore[no-untyped-def]
        """a * b."""
        return a * b

    @triton.jit
    def exp(x):  # type: ignore[no-untyped-def]
        """The exponential."""
        return tl.exp(x)

    @triton.jit
    def expm1(x):  # type: ignore[no-untyped-def]
        """exp(x) - 1."""
        return (tl.exp(x.to(tl.float64)) - 1.0).to(tl.float32)

    @triton.jit
    def log(x):  # type: ignore[no-untyped-def]
        """The natural logarithm."""
        return tl.log(x)

    @triton.jit
    def log1p(x):  # type: ignore[no-untyped-def]
        """log(1 + x)."""
        return tl.log(1.0 + x.to(tl.float64)).to(tl.float32)

    @triton.jit
    def tanh(x):  # type: ignore[no-untyped-def]
        """The hyperbolic tangent."""
        return (1.0 - 2.0 / (tl.exp(2.0 * x.to(tl.float64)) + 1.0)).to(tl.float32)

    @triton.jit
    def erf(x):  # type: ignore[no-untyped-def]
        """The error function."""
        return tl.math.erf(x)

    @triton.jit
    def sin(x):  # type: ignore[no-untyped-def]
        """The sine."""
        return tl.math.sin(x)

    @triton.jit
    def cos(x):  # type: ignore[no-untyped-def]
        """The cosine."""
        return tl.math.cos(x)

else:
    exp, expm1, log, log1p, tanh = libdevice.exp, libdevice.expm1, libdevice.log, libdevice.log1p, libdevice.tanh
    erf, sin, cos = libdevice.erf, libdevice.sin, libdevice.cos

    @triton.jit
    def product(a, b):  # type: ignore[no-untyped-def]
        """a * b, and of float32 never a part of a fused multiplication and addition."""
        if a.dtype == tl.float32:
            result = tl.inline_asm_elementwise(
                "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
            )
        else:
            result = a * b
        return result


@triton.jit
def sigmoid(x):  # type: ignore[no-untyped-def]
    """1 / (1 + exp(-x))."""
    return tl.math.div_rn(1.0, 1.0 + exp(-x))


@triton.jit
def of_one(x, NAME: tl.constexpr):  # type: ignore[no-untyped-def]
    """A function of one tensor, and of constants."""
    if NAME == "to":
        result = x
    elif NAME == "neg":
        result = -x
    elif NAME == "abs":
        result = tl.abs(x)
    elif NAME == "floor":
        result = tl.floor(x)
    elif NAME == "relu":
        result = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif NAME == "exp":
        result = exp(x)
    elif NAME == "expm1":
        result = expm1(x)
    elif NAME == "log":
        result = log(x)
    elif NAME == "log1p":
        result = log1p(x)
    elif NAME == "sqrt":
        result = tl.math.sqrt_rn(x)
    elif NAME == "rsqrt":
        result = tl.math.div_rn(1.0, tl.math.sqrt_rn(x))
    elif NAME == "tanh":
        result = tanh(x)
    elif NAME == "sigmoid":
        result = sigmoid(x)
    elif NAME == "silu":
        result = tl.math.div_rn(x, 1.0 + exp(-x))
    elif NAME == "gelu":
        result = product(x * 0.5, 1.0 + erf(x * 0.7071067811865476))
    elif NAME == "gelu_tanh":
        inner = (x + product(product(x, x), x) * 0.044715) * 0.7978845608028654
        result = product(x * 0.5, 1.0 + tanh(inner))
    elif NAME == "sin":
        result = sin(x)
    elif NAME == "cos":
        result = cos(x)
    elif NAME == "square":
        result = product(x, x)
    elif NAME == "reciprocal":
        result = tl.math.div_rn(1.0, x)
    else:
        tl.static_assert(NAME == "logical_not")
        result = x == 0
    return result


@triton.jit
def of_two(a, b, NAME: tl.constexpr):  # type: ignore[no-untyped-def]
    """A function of two tensors, or of a tensor and a number."""
    if NAME == "add":
        result = a + b
    elif NAME == "sub":
        result = a - b
    elif NAME == "mul":
        result = product(a, b)
    elif NAME == "div":
        result = tl.math.div_rn(a, b)
    elif NAME == "maximum":
        result = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif NAME == "minimum":
        result = tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif NAME == "bitwise_xor":
        result = a ^ b
    elif NAME == "remainder":
        rest = a % b
        # It has the sign of what is divided by, which in Triton it has in the interpreter alone.
        result = tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)
    elif NAME == "eq":
        result = a == b
    elif NAME == "ne":
        result = a != b
    elif NAME == "ge":
        result = a >= b
    elif NAME == "gt":
        result = a > b
    elif NAME == "le":
        result = a <= b
    else:
        tl.static_assert(NAME == "lt")
        result = a < b
    return result


@triton.jit
def argument(values, STEPS: tl.constexpr, N: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Argument K of step N, in the type in which the step computes."""
    if at(STEPS, "steps", N, "is_number", K):
        result = tl.full((1, 1), at(STEPS, "steps", N, "args", K), type_at(STEPS, "steps", N, "computed"))
        result = result.to(type_at(STEPS, "steps", N, "numbers")).to(type_at(STEPS, "steps", N, "computed"))
    else:
        result = values[at(STEPS, "steps", N, "args", K)].to(type_at(STEPS, "steps", N, "computed"))
    return result


@triton.jit
def step(values, column_mask, num_columns, NAME: tl.constexpr, STEPS: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """What step N makes, rounded to its type."""
    if NAME == "sum":
        result = tl.sum(tl.where(column_mask, argument(values, STEPS, N, 0), 0), axis=1, keep_dims=True)
    elif NAME == "mean":
        total = tl.sum(tl.where(column_mask, argument(values, STEPS, N, 0), 0), axis=1, keep_dims=True)
        result = tl.math.div_rn(total, tl.full((1, 1), 0.0, tl.float32) + num_columns)
    elif NAME == "where":
        condition = values[at(STEPS, "steps", N, "condition")]
        result = tl.where(condition, argument(values, STEPS, N, 0), argument(values, STEPS, N, 1))
    elif count(STEPS, "steps", N, "args") == 1:
        result = of_one(argument(values, STEPS, N, 0), NAME)
    else:
        result = of_two(argument(values, STEPS, N, 0), argument(values, STEPS, N, 1), NAME)
    return result.to(type_at(STEPS, "steps", N, "dtype"))


@triton.jit
def offsets(row, column, strides, sizes, STEPS: tl.constexpr, X: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the elements of operand X lie in these rows and columns: in one row or column, where it has no more."""
    result = tl.full((1, 1), 0, tl.int64)
    rest = row
    for place in tl.static_range(2, at(STEPS, "outer") - 1, -1):
        if at(STEPS, "operands", X, "axes", place):
            result = result + (rest if place == at(STEPS, "outer") else rest % sizes[place]) * strides[place]
        rest = rest // sizes[place]
    if at(STEPS, "operands", X, "axes", 3):
        result = result + column * strides[3]
    return result


@triton.jit
def seen(row_mask, column_mask, STEPS: tl.constexpr, X: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which of these elements of operand X there are."""
    result = tl.full((1, 1), 1, tl.int1)
    for place in tl.static_range(3):
        if at(STEPS, "operands", X, "axes", place):
            result = result & row_mask
    if at(STEPS, "operands", X, "axes", 3):
        result = result & column_mask
    return result


@triton.jit
def fused_kernel(  # type: ignore[no-untyped-def]
    x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11,
    y0, y1, y2, y3,
    a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11,
    b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11,
    c0, c1, c2, c3, c4, c5, c6, c7, c8, c9, c10, c11,
    d0, d1, d2, d3, d4, d5, d6, d7, d8, d9, d10, d11,
    size_a, size_b, size_c, num_rows, num_columns,
    STEPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pointers = (x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11)
    outs = (y0, y1, y2, y3)
    strides = (
        (a0, b0, c0, d0), (a1, b1, c1, d1), (a2, b2, c2, d2), (a3, b3, c3, d3), (a4, b4, c4, d4), (a5, b5, c5, d5),
        (a6, b6, c6, d6), (a7, b7, c7, d7), (a8, b8, c8, d8), (a9, b9, c9, d9), (a10, b10, c10, d10),
        (a11, b11, c11, d11),
    )  # fmt: skip
    sizes = (size_a, size_b, size_c)
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    row_mask, column_mask = row < num_rows, column < num_columns
    wait_for_previous(PDL)
    values = ()
    for x in tl.static_range(count(STEPS, "operands")):
        place = offsets(row, column, strides[x], sizes, STEPS, x)
        loaded = tl.load(pointers[x] + place, mask=seen(row_mask, column_mask, STEPS, x), other=0)
        values = values + (loaded.to(type_at(STEPS, "operands", x, "dtype")),)  # type: ignore[assignment]  # noqa: RUF005
    for i in tl.static_range(count(STEPS, "steps")):
        made = step(values, column_mask, num_columns, at(STEPS, "steps", i, "name"), STEPS, i)
        values = values + (made,)  # type: ignore[assignment]  # noqa: RUF005
    for y in tl.static_range(count(STEPS, "results")):
        value = values[at(STEPS, "results", y, "value")]  # type: ignore[var-annotated]
        if at(STEPS, "results", y, "columns"):
            value = tl.broadcast_to(value, (ROWS, COLUMNS))
            tl.store(outs[y] + row * num_columns + column, value, mask=row_mask & column_mask)
        else:
            value = tl.broadcast_to(value, (ROWS, 1))
            tl.store(outs[y] + row, value, mask=row_mask & (tl.program_id(1) == 0))
