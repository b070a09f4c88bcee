"""Ops on each element by itself: arithmetic, comparisons, choices."""

from __future__ import annotations

from precast.ir.graph.schema import TensorType
from precast.ir.ops.checks import COMPUTED, FLOATS, INTEGERS, broadcast, expect, expect_dtype, expect_shape, promoted
from precast.ir.ops.op import EACH, Args, Integers, row
from precast.ir.ops.work import nothing


def pointwise(args: Args) -> tuple[TensorType, ...]:
    operands = [value for value in args.values() if value is not None]
    shape = broadcast(*(operand.shape for operand in operands if isinstance(operand, TensorType)))
    return (TensorType(promoted(operands), shape),)  # type: ignore[arg-type]


def pointwise_float(args: Args) -> tuple[TensorType, ...]:
    (result,) = pointwise(args)
    return (result if result.dtype in FLOATS else TensorType("float32", result.shape),)


def arithmetic(args: Args) -> tuple[TensorType, ...]:
    """As `pointwise`, of numbers only: torch subtracts, negates and compares with zero no bool."""
    for name, value in args.items():
        is_bool = isinstance(value, bool) or (isinstance(value, TensorType) and value.dtype == "bool")
        expect(not is_bool, f"{name}: expected numbers, found bool")
    return pointwise(args)


def clamp(args: Args) -> tuple[TensorType, ...]:
    expect(args.get("min") is not None or args.get("max") is not None, "min, max: expected one of them at least")
    return arithmetic(args)


def activation(args: Args) -> tuple[TensorType, ...]:
    x, kind = args["self"], args.get("approximate", "none")
    expect_dtype("self", x, *COMPUTED)
    expect(kind in ("none", "tanh"), f"approximate: expected none or tanh, found {kind!r}")
    return (x,)


def softplus(args: Args) -> tuple[TensorType, ...]:
    expect_dtype("self", args["self"], *COMPUTED)
    return (args["self"],)


def cast(args: Args) -> tuple[TensorType, ...]:
    return (TensorType(args["dtype"], args["self"].shape),)


def compare(args: Args) -> tuple[TensorType, ...]:
    operands = [value for value in args.values() if isinstance(value, TensorType)]
    promoted(list(args.values()))  # refuses what can't be combined
    for operand in operands:
        expect_dtype("self, other", operand, *INTEGERS, *COMPUTED)
    return (TensorType("bool", broadcast(*(operand.shape for operand in operands))),)


def logical_not(args: Args) -> tuple[TensorType, ...]:
    expect_dtype("self", args["self"], *INTEGERS, *COMPUTED)
    return (TensorType("bool", args["self"].shape),)


def bitwise_not(args: Args) -> tuple[TensorType, ...]:
    expect_dtype("self", args["self"], *INTEGERS)
    return (args["self"],)


def of_integers(args: Args) -> tuple[TensorType, ...]:
    for name in ("self", "other"):
        expect_dtype(name, args[name], "uint8", "int8", "int32", "int64")
    return pointwise(args)


def full_like(args: Args) -> tuple[TensorType, ...]:
    expect_dtype("self", args["self"], *INTEGERS, *COMPUTED)
    return (args["self"],)


def masked_fill(args: Args) -> tuple[TensorType, ...]:
    x, mask, value = args["self"], args["mask"], args["value"]
    expect_dtype("mask", mask, "bool")
    expect_dtype("self", x, *INTEGERS, *COMPUTED)
    expect(promoted((x, value)) == x.dtype, f"value: {value} is of a higher kind than {x.dtype}")
    expect_shape("mask, broadcast", broadcast(mask.shape, x.shape), x.shape)
    return (x,)


def where(args: Args) -> tuple[TensorType, ...]:
    condition, x, other = args["condition"], args["self"], args["other"]
    expect_dtype("condition", condition, "bool")
    shape = broadcast(condition.shape, x.shape, other.shape)
    return (TensorType(promoted((x, other)), shape),)  # type: ignore[arg-type]


def one_hot(args: Args) -> tuple[TensorType, ...]:
    x, classes = args["self"], args.get("num_classes", -1)
    expect_dtype("self", x, "int64")
    expect(isinstance(classes, int) and classes > 0, f"num_classes: expected a count, found {classes}")
    return (TensorType("int64", (*x.shape, classes)),)


ROWS = (
    row("aten.add.Tensor(Tensor self, Tensor|Scalar other) -> Tensor", pointwise, EACH),
    row("aten.sub.Tensor(Tensor self, Tensor|Scalar other) -> Tensor", arithmetic, EACH),
    row("aten.mul.Tensor(Tensor self, Tensor|Scalar other) -> Tensor", pointwise, EACH),
    row("aten.div.Tensor(Tensor self, Tensor|Scalar other) -> Tensor", pointwise_float, EACH),
    row("aten.rsub.Scalar(Tensor self, Scalar other) -> Tensor", arithmetic, EACH),
    row("aten.pow.Tensor_Scalar(Tensor self, Scalar exponent) -> Tensor", pointwise, EACH),
    row("aten.minimum.default(Tensor self, Tensor other) -> Tensor", pointwise, EACH),
    row("aten.maximum.default(Tensor self, Tensor other) -> Tensor", pointwise, EACH),
    row("aten.clamp.default(Tensor self, Scalar min=None, Scalar max=None) -> Tensor", clamp, EACH),
    row("aten.neg.default(Tensor self) -> Tensor", arithmetic, EACH),
    row("aten.abs.default(Tensor self) -> Tensor", arithmetic, EACH),
    row("aten.floor.default(Tensor self) -> Tensor", arithmetic, EACH),
    row("aten.relu.default(Tensor self) -> Tensor", arithmetic, EACH),
    row("aten.exp.default(Tensor self) -> Tensor", pointwise_float, EACH),
    row("aten.expm1.default(Tensor self) -> Tensor", pointwise_float, EACH),
    row("aten.log.default(Tensor self) -> Tensor", pointwise_float, EACH),
    row("aten.log1p.default(Tensor self) -> Tensor", pointwise_float, EACH),
    row("aten.rsqrt.default(Tensor self) -> Tensor", pointwise_float, EACH),
    row("aten.sqrt.default(Tensor self) -> Tensor", pointwise_float, EACH),
    row("aten.tanh.default(Tensor self) -> Tensor", pointwise_float, EACH),
    row("aten.sigmoid.default(Tensor self) -> Tensor", pointwise_float, EACH),
    row("aten.cos.default(Tensor self) -> Tensor", pointwise_float, EACH),
    row("aten.sin.default(Tensor self) -> Tensor", pointwise_float, EACH),
    row("aten.silu.default(Tensor self) -> Tensor", activation, EACH),
    row("aten.gelu.default(Tensor self, *, str approximate='none') -> Tensor", activation, EACH),
    row("aten.softplus.default(Tensor self, Scalar beta=1, Scalar threshold=20) -> Tensor", softplus, EACH),
    row("aten.to.dtype(Tensor self, Dtype dtype) -> Tensor", cast, EACH, nothing),
    *(
        row(f"aten.{name}.{kind}(Tensor self, {kind} other) -> Tensor", compare, EACH)
        for name in ("eq", "ne", "ge", "gt", "le", "lt")
        for kind in ("Scalar", "Tensor")
    ),
    row("aten.logical_not.default(Tensor self) -> Tensor", logical_not, EACH),
    row("aten.bitwise_not.default(Tensor self) -> Tensor", bitwise_not, EACH),
    row("aten.bitwise_xor.Tensor(Tensor self, Tensor other) -> Tensor", of_integers, EACH),
    row("aten.remainder.Tensor(Tensor self, Tensor other) -> Tensor", of_integers, EACH),
    row("aten.full_like.default(Tensor self, Scalar fill_value) -> Tensor", full_like, EACH),
    row("aten.masked_fill.Scalar(Tensor self, Tensor mask, Scalar value) -> Tensor", masked_fill, EACH, nothing),
    row("aten.where.self(Tensor condition, Tensor self, Tensor other) -> Tensor", where, EACH, nothing),
    row(
        "aten.one_hot.default(Tensor self, int num_classes) -> Tensor",
        one_hot,
        EACH,
        integers={"self": Integers("index", "num_classes")},
    ),
)
