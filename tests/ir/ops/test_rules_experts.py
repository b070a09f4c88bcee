"""The shape rules of mixtures of experts and of the ops that routers are written in, against torch's own answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from router_ops import ROUTER_OPS

from precast.ir.graph import symbols
from precast.ir.graph.schema import Dtype, Expr, TensorType
from precast.ir.ops import table as ops
from precast.ir.ops.op import ShapeError

Args = dict[str, Any]
SIZES = {"T": 7}
DTYPES: tuple[Dtype, ...] = (
    "bool", "int8", "uint8", "int32", "int64", "float8_e4m3fn", "float16", "bfloat16", "float32", "float64",
)  # fmt: skip


def t(dtype: Dtype, *shape: Expr) -> TensorType:
    return TensorType(dtype, shape)


def f32(*shape: Expr) -> TensorType:
    return TensorType("float32", shape)


def i64(*shape: Expr) -> TensorType:
    return TensorType("int64", shape)


def infer(op: str, args: Args) -> tuple[TensorType, ...]:
    definition = ops.lookup(op)
    assert definition is not None, op
    return definition.shape_rule(args)


def at(value: TensorType) -> TensorType:
    """The type with its symbols' sizes."""
    return TensorType(value.dtype, tuple(symbols.evaluate(size, SIZES) for size in value.shape))


def run(op: str, args: Args, device: str) -> tuple[TensorType, ...] | None:
    """What torch returns for tensors of these types, or None when it raises."""
    function: Any = torch.ops.aten
    for part in op.removeprefix("aten.").split("."):
        function = getattr(function, part)
    given = {}
    for name, value in args.items():
        if isinstance(value, TensorType):
            kind = at(value)
            value = torch.zeros(kind.shape, dtype=getattr(torch, kind.dtype), device=device)  # type: ignore[arg-type]
        given[name] = getattr(torch, value) if name == "dtype" else value
    try:
        results = function(**given)
    except (RuntimeError, IndexError, NotImplementedError):
        return None
    tensors = results if isinstance(results, tuple) else (results,)
    return tuple(TensorType(str(x.dtype).removeprefix("torch."), tuple(x.shape)) for x in tensors)  # type: ignore[arg-type]


COMPARISONS = [f"aten.{name}" for name in ("eq", "ne", "ge", "gt", "le", "lt")]
SCATTER: Args = {"self": f32("T", 5), "dim": 1, "index": i64("T", 3)}

ACCEPTED: list[tuple[str, Args]] = [
    ("aten.topk.default", {"self": f32("T", 6), "k": 2}),
    ("aten.topk.default", {"self": f32(6, "T"), "k": 6, "dim": 0, "largest": False, "sorted": False}),
    ("aten.sort.default", {"self": f32("T", 6)}),
    ("aten.sort.default", {"self": t("bool", "T", 6), "dim": 0, "descending": True}),
    ("aten.max.dim", {"self": t("int32", "T", 6), "dim": -1}),
    ("aten.max.dim", {"self": f32("T", 6), "dim": 1, "keepdim": True}),
    ("aten.argmax.default", {"self": f32("T", 6), "dim": 0}),
    ("aten.argmax.default", {"self": f32("T", 6), "dim": -1, "keepdim": True}),
    ("aten.cumsum.default", {"self": t("bool", "T", 6), "dim": 0}),
    ("aten.cumsum.default", {"self": t("float16", "T", 6), "dim": 1, "dtype": "float32"}),
    ("aten.gather.default", {"self": f32("T", 5), "dim": 1, "index": i64("T", 9)}),
    ("aten.gather.default", {"self": f32(8, 5), "dim": 0, "index": i64(2, 3)}),
    ("aten.scatter.src", {**SCATTER, "src": f32("T", 4)}),
    ("aten.scatter.value", {**SCATTER, "value": 1}),
    ("aten.one_hot.default", {"self": i64("T", 2), "num_classes": 6}),
    ("aten.masked_fill.Scalar", {"self": f32("T", 6), "mask": t("bool", "T", 1), "value": float("-inf")}),
    ("aten.where.self", {"condition": t("bool", "T", 1), "self": f32(6), "other": t("int64")}),
    ("aten.full_like.default", {"self": t("int32", "T"), "fill_value": 2.5}),
    ("aten.logical_not.default", {"self": f32("T")}),
    ("aten.bitwise_not.default", {"self": t("bool", "T")}),
    *((f"{name}.Scalar", {"self": t("int64", "T"), "other": 0.5}) for name in COMPARISONS),
    *((f"{name}.Tensor", {"self": f32("T", 1), "other": t("int32", 6)}) for name in COMPARISONS),
]


@pytest.mark.parametrize(("op", "args"), ACCEPTED)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_rule_gives_what_torch_does(op: str, args: Args, device: str) -> None:
    assert tuple(map(at, infer(op, args))) == run(op, args, device)


@pytest.mark.parametrize(("op", "args"), ACCEPTED)
def test_a_rule_never_accepts_what_torch_refuses(op: str, args: Args) -> None:
    """Each tensor in each dtype, one after the other."""
    for name, value in args.items():
        if not isinstance(value, TensorType):
            continue
        for dtype in DTYPES:
            changed = {**args, name: TensorType(dtype, value.shape)}
            try:
                found = tuple(map(at, infer(op, changed)))
            except ShapeError:
                continue
            assert found == run(op, changed, "cpu"), f"{name}: {dtype}"


LOGITS = f32("T", 12)
ROUTE: Args = {
    "logits": LOGITS,
    "bias": f32(12),
    "scoring": "sigmoid",
    "top_k": 4,
    "normalise": True,
    "dtype": "float16",
}
LINEAR: Args = {"x": f32("T", 6), "weight": f32(3, 8, 6), "bias": f32(3, 8), "expert_ids": i64("T")}
EXPERTS: Args = {
    "x": f32("T", 6), "expert_ids": i64("T", 2), "expert_weights": t("float16", "T", 2), "up": f32(3, 8, 6),
    "down": f32(3, 6, 4), "up_bias": f32(3, 8), "down_bias": f32(3, 6), "activation": "silu", "gated": True,
}  # fmt: skip


def test_our_ops_give_these_types() -> None:
    assert infer("precast.route", ROUTE) == (t("float16", "T", 4), i64("T", 4))
    assert infer("precast.grouped_linear", LINEAR) == (f32("T", 8),)
    assert infer("precast.experts", EXPERTS) == (f32("T", 6),)
    ungated = {**EXPERTS, "gated": False, "up": f32(3, 4, 6), "up_bias": None, "down_bias": None}
    assert infer("precast.experts", ungated) == (f32("T", 6),)


REJECTED: list[tuple[str, Args, str]] = [
    ("aten.topk.default", {"self": f32("T", 6), "k": 7}, "k: expected at most 6"),
    ("aten.topk.default", {"self": f32("T", 6), "k": "T"}, "k: expected a count"),
    ("aten.topk.default", {"self": t("int64", 6), "k": 1}, "self: expected dtype"),
    ("aten.sort.default", {"self": f32("T"), "dim": 1}, "1 is outside"),
    ("aten.max.dim", {"self": f32("T", 0), "dim": 1}, "dimension 1 has no elements"),
    ("aten.max.dim", {"self": t("bool", 3), "dim": 0}, "self: expected dtype"),
    ("aten.argmax.default", {"self": f32(), "dim": 0}, "at least one dimension"),
    ("aten.cumsum.default", {"self": f32("T"), "dim": 2}, "2 is outside"),
    ("aten.gather.default", {"self": f32(2, 5), "dim": 1, "index": i64(3, 2)}, "index: expected at most 2"),
    ("aten.gather.default", {"self": f32(2, 5), "dim": 1, "index": i64("T", 2)}, "index's dimension 0"),
    ("aten.gather.default", {"self": f32(2, 5), "dim": 1, "index": t("int32", 2, 2)}, "index: expected dtype"),
    ("aten.gather.default", {"self": f32(2, 5), "dim": 1, "index": i64(2)}, "index: expected 2 dimensions"),
    ("aten.scatter.src", {**SCATTER, "src": f32("T", 2)}, "index: expected at most 2"),
    ("aten.scatter.src", {**SCATTER, "src": t("float16", "T", 3)}, "src: expected dtype"),
    ("aten.scatter.value", {**SCATTER, "index": i64(3), "value": 1}, "index: expected 2"),
    ("aten.one_hot.default", {"self": i64("T"), "num_classes": -1}, "num_classes: expected a count"),
    ("aten.one_hot.default", {"self": t("int32", "T"), "num_classes": 3}, "self: expected dtype"),
    ("aten.masked_fill.Scalar", {"self": f32(3), "mask": t("bool", 4), "value": 1}, "don't broadcast"),
    ("aten.masked_fill.Scalar", {"self": f32(3), "mask": t("bool", 2, 3), "value": 1}, "mask, broadcast"),
    ("aten.masked_fill.Scalar", {"self": i64(3), "mask": t("bool", 3), "value": 0.5}, "value: 0.5 is of a higher kind"),
    ("aten.where.self", {"condition": i64(3), "self": f32(3), "other": f32(3)}, "condition: expected dtype"),
    ("aten.full_like.default", {"self": t("float8_e4m3fn", 3), "fill_value": 1}, "self: expected dtype"),
    ("aten.logical_not.default", {"self": t("float8_e4m3fn", 3)}, "self: expected dtype"),
    ("aten.bitwise_not.default", {"self": f32(3)}, "self: expected dtype"),
    *((f"{name}.Scalar", {"self": t("float8_e4m3fn", 3), "other": 1}, "for storage") for name in COMPARISONS),
    *((f"{name}.Tensor", {"self": f32("T"), "other": f32(6)}, "don't broadcast") for name in COMPARISONS),
    ("precast.route", {**ROUTE, "logits": f32(1, "T", 12)}, "logits: expected 2"),
    ("precast.route", {**ROUTE, "bias": f32(1)}, "bias: expected shape"),
    ("precast.route", {**ROUTE, "bias": i64(12)}, "bias: expected dtype"),
    ("precast.route", {**ROUTE, "top_k": 13}, "top_k: expected 1 to 12, found 13"),
    ("precast.route", {**ROUTE, "top_k": 7, "num_groups": 4, "top_groups": 2}, "top_k: expected 1 to 6"),
    ("precast.route", {**ROUTE, "num_groups": 5}, "12 experts are no multiple of 5"),
    ("precast.route", {**ROUTE, "num_groups": 12}, "groups of at least 2"),
    ("precast.route", {**ROUTE, "num_groups": 2, "top_groups": 3}, "top_groups: expected 1 to 2"),
    ("precast.route", {**ROUTE, "scoring": "tanh"}, "scoring: expected one of softmax"),
    ("precast.route", {**ROUTE, "choice": "ids"}, "choice: expected one of"),
    ("precast.route", {**ROUTE, "group_score": "mean"}, "group_score: expected one of"),
    ("precast.route", {**ROUTE, "epsilon": -1.0}, "epsilon: expected at least 0"),
    ("precast.route", {**ROUTE, "floor": -1.0}, "floor: expected at least 0"),
    ("precast.route", {**ROUTE, "dtype": "int64"}, "dtype: expected dtype"),
    ("precast.grouped_linear", {**LINEAR, "x": f32("T", 5)}, "x's last dimension"),
    ("precast.grouped_linear", {**LINEAR, "weight": f32(8, 6)}, "weight: expected 3"),
    ("precast.grouped_linear", {**LINEAR, "bias": f32(8)}, "bias: expected shape"),
    ("precast.grouped_linear", {**LINEAR, "expert_ids": t("int32", "T")}, "expert_ids: expected dtype"),
    ("precast.grouped_linear", {**LINEAR, "expert_ids": i64(3)}, "expert_ids: expected shape"),
    ("precast.experts", {**EXPERTS, "x": f32(1, "T", 6)}, "x: expected 2"),
    ("precast.experts", {**EXPERTS, "expert_ids": i64(3, 2)}, "expert_ids, but for its last"),
    ("precast.experts", {**EXPERTS, "expert_weights": f32("T", 3)}, "expert_weights: expected shape"),
    ("precast.experts", {**EXPERTS, "up": f32(3, 8, 5)}, "up's last dimension"),
    ("precast.experts", {**EXPERTS, "up": f32(3, 7, 6)}, "gate and up in one, found 7 rows"),
    ("precast.experts", {**EXPERTS, "gated": False}, "down: expected shape"),
    ("precast.experts", {**EXPERTS, "down": t("float16", 3, 6, 4)}, "down: expected dtype"),
    ("precast.experts", {**EXPERTS, "up_bias": f32(8)}, "up_bias: expected shape"),
    ("precast.experts", {**EXPERTS, "down_bias": t("float16", 3, 6)}, "down_bias: expected dtype"),
    ("precast.experts", {**EXPERTS, "activation": "swish"}, "activation: expected one of silu"),
    ("precast.experts", {**EXPERTS, "limit": 0.0}, "limit: expected None or more than 0"),
]


@pytest.mark.parametrize(("op", "args", "message"), REJECTED)
def test_a_rule_says_what_it_expected(op: str, args: Args, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        infer(op, args)


def test_every_router_op_is_here() -> None:
    ours = {"precast.route", "precast.grouped_linear", "precast.experts"}

    assert {op for op, _ in ACCEPTED} == ROUTER_OPS
    assert {op for op, _, _ in REJECTED} == ROUTER_OPS | ours
