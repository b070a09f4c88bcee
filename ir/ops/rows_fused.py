"""The fused op: steps that are ops of the table, over up to twelve operands, in one launch.

Its body is data (`precast.ir.graph.schema.Steps`). A step computes what its op computes, rounded to the same type, so
a fused op gives what its steps give one by one. All of it has one space: the rows and columns of the largest shape.
What a step makes fills the space, or has one element for each row, or is the same for all rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from precast.ir import limits
from precast.ir.graph import symbols
from precast.ir.graph.infer import apply_shape_rule, misfits, references
from precast.ir.graph.schema import Const, Dim, Expr, Items, Ref, Step, Steps, TensorType
from precast.ir.graph.symbols import shape_text
from precast.ir.ops import rows_pointwise, rows_reductions
from precast.ir.ops.checks import COMPUTED, INTEGERS, broadcast, expect, expect_dtype, expect_shape
from precast.ir.ops.op import EACH, Args, ShapeError, row
from precast.ir.ops.work import steps as steps_work

MAX_OPERANDS = 12
"""As many as the signature has."""

REDUCTIONS = ("aten.mean.dim", "aten.sum.dim_IntList")
"""Steps over the columns of each row."""

EXPONENTS = (2, 3, 0.5, -0.5, -1)
"""Those of `pow` that need no general power."""

_POINTWISE = (
    "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "rsub.Scalar", "pow.Tensor_Scalar", "minimum.default",
    "maximum.default", "clamp.default", "neg.default", "abs.default", "relu.default", "exp.default", "expm1.default",
    "log.default", "log1p.default", "rsqrt.default", "sqrt.default", "tanh.default", "sigmoid.default", "cos.default",
    "sin.default", "silu.default", "gelu.default", "softplus.default", "to.dtype", "logical_not.default",
    "masked_fill.Scalar", "where.self", "bitwise_xor.Tensor", "remainder.Tensor",
    *(f"{name}.{kind}" for name in ("eq", "ne", "ge", "gt", "le", "lt") for kind in ("Scalar", "Tensor")),
)  # fmt: skip

FUNCTIONS = {
    each.name: each
    for each in (*rows_pointwise.ROWS, *rows_reductions.ROWS)
    if each.name in REDUCTIONS or each.name.removeprefix("aten.") in _POINTWISE
}
"""What a step may be, by the op's name."""

Types = Mapping[str, TensorType]


def fused(args: Args) -> tuple[TensorType, ...]:
    operands = {f"x{i}": args[f"x{i}"] for i in range(MAX_OPERANDS) if args.get(f"x{i}") is not None}
    steps = args["steps"]
    types = step_types(steps, operands)
    _expect_all_used(steps, operands)
    full = space(types.values())
    for name in steps.results:
        expect(name in types and name not in operands, f"steps: {name} is returned, and no step makes it")
        expect_dtype(f"steps: the result {name}", types[name], *COMPUTED)
        expect(fills_rows(types[name].shape, full), f"steps: the result {name} is the same for all rows")
    return tuple(types[name] for name in steps.results)


def step_types(steps: Steps, operands: Types) -> dict[str, TensorType]:
    """The types of the operands and of what the steps make, by name.

    Raises ShapeError for steps that are no steps of a fused op, with the first that isn't.
    """
    for i, name in enumerate(operands):
        expect(name == f"x{i}", f"x{i}: required before {name}, not given")
        expect_dtype(name, operands[name], *INTEGERS, *COMPUTED)
    count = len(steps.steps)
    expect(0 < count <= limits.MAX_FUSED_STEPS, f"steps: expected 1 to {limits.MAX_FUSED_STEPS}, found {count}")
    types = dict(operands)
    for i, step in enumerate(steps.steps):
        try:
            types[f"s{i}"] = _step_type(step, types)
        except ShapeError as error:
            raise ShapeError(f"step s{i}, {step.op}: {error}") from error
    full = space(types.values())
    for i, step in enumerate(steps.steps):
        shape = types[f"s{i}"].shape
        inside = fills_rows(shape, full) or is_one_row(shape)
        expect(inside, f"step s{i}: {shape_text(shape)} is no part of the rows of {shape_text(full)}")
        if step.op in REDUCTIONS:
            (name,) = references(step.args)
            expect_shape(f"step s{i}, {step.op}: the last dimension of {name}", types[name].shape[-1:], full[-1:])
    return types


def _step_type(step: Step, types: Types) -> TensorType:
    op = FUNCTIONS.get(step.op)
    if op is None:
        raise ShapeError("no fused op has such a step")
    for problem in misfits(op, step.args):
        raise ShapeError(problem)
    for name in references(step.args):
        expect(name in types, f"{name} is no operand, and nothing that an earlier step makes")
    for arg in step.args.values():
        items = arg.items if isinstance(arg, Items) else (arg,)
        expect(not any(isinstance(item, Dim) for item in items), "a size of a step is no argument of a fused op's")
    (result,) = apply_shape_rule(op, step.args, types)
    expect_dtype("the result", result, *INTEGERS, *COMPUTED)
    if step.op in REDUCTIONS:
        _expect_along_rows(step, types)
    if step.op == "aten.pow.Tensor_Scalar":
        exponent = step.args["exponent"]
        known = isinstance(exponent, Const) and exponent.value in EXPONENTS
        expect(known, f"exponent: expected one of {', '.join(map(str, EXPONENTS))}")
    return result


def _expect_along_rows(step: Step, types: Types) -> None:
    """A sum along the last dimension, whose size is the same in every step of a run: it counts no tokens."""
    source, dim = step.args["self"], step.args["dim"]
    assert isinstance(source, Ref), "it fits the signature"
    x = types[source.name]
    last = Items((Const(-1),)), Items((Const(len(x.shape) - 1),))
    expect(dim in last and step.args.get("keepdim") == Const(True), "expected the last dimension, kept")
    expect(isinstance(x.shape[-1], int), f"expected columns of known number, found {shape_text(x.shape)}")
    expect_dtype("self", x, *COMPUTED)


def _expect_all_used(steps: Steps, operands: Types) -> None:
    """No operand and no step is for nothing, and each result is named once."""
    used = {name for step in steps.steps for name in references(step.args)} | set(steps.results)
    for name in (*operands, *(f"s{i}" for i in range(len(steps.steps)))):
        expect(name in used, f"steps: nothing takes {name}")
    count = len(steps.results)
    expect(0 < count <= limits.MAX_FUSED_RESULTS, f"results: expected 1 to {limits.MAX_FUSED_RESULTS}, found {count}")
    expect(len(set(steps.results)) == count, "results: expected each once")


def space(types: Iterable[TensorType]) -> tuple[Expr, ...]:
    """The common shape of operands and steps."""
    return broadcast(*(kind.shape for kind in types))


def fills_rows(shape: Sequence[Expr], full: Sequence[Expr]) -> bool:
    """Whether a tensor of this shape has all elements of the space, or one for each of its rows."""
    padded = (*(1 for _ in range(len(full) - len(shape))), *shape)
    same = [symbols.equal(a, b) for a, b in zip(padded, full, strict=True)]
    return all(same[:-1]) and (not full or same[-1] or padded[-1] == 1)


def is_one_row(shape: Sequence[Expr]) -> bool:
    """Whether a tensor of this shape is the same for all rows."""
    return all(size == 1 for size in shape[:-1])


_MORE = ", ".join(f"Tensor? x{i}=None" for i in range(1, MAX_OPERANDS))

ROWS = (row(f"precast.fused(Tensor x0, {_MORE}, *, Steps steps) -> Tensor[]", fused, EACH, steps_work),)
