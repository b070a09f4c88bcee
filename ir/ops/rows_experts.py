"""Mixtures of experts: the choice of experts, and products with one of several weights for each row."""

from __future__ import annotations

from precast.ir.graph import symbols
from precast.ir.graph.schema import TensorType
from precast.ir.ops import work
from precast.ir.ops.checks import (
    COMPUTED,
    expect,
    expect_dtype,
    expect_floating,
    expect_known,
    expect_one_of,
    expect_rank,
    expect_shape,
)
from precast.ir.ops.op import Args, Integers, last_of, row

EXPERT_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
SCORINGS = ("softmax", "sigmoid", "sqrt_softplus")
CHOICES = ("scores", "logits")
GROUP_SCORES = ("top2", "max")


def route(args: Args) -> tuple[TensorType, ...]:
    logits, bias = args["logits"], args.get("bias")
    expect_rank("logits", logits, 2)
    expect_dtype("logits", logits, *COMPUTED)
    experts, top_k = logits.shape[1], args["top_k"]
    if bias is not None:
        expect_floating("bias", bias, (experts,))
    for name, allowed in (("scoring", SCORINGS), ("choice", CHOICES), ("group_score", GROUP_SCORES)):
        expect_one_of(name, args.get(name, allowed[0]), allowed)
    groups, top_groups = args.get("num_groups", 1), args.get("top_groups", 1)
    expect(1 <= top_groups <= groups, f"top_groups: expected 1 to {groups}, found {top_groups}")
    expect_known("experts", experts)
    if isinstance(experts, int):
        expect(experts % groups == 0, f"num_groups: {experts} experts are no multiple of {groups}")
        least = 2 if groups > 1 and args.get("group_score", "top2") == "top2" else 1
        expect(experts // groups >= least, f"num_groups: expected groups of at least {least}, found {groups} groups")
        allowed_k = experts // groups * top_groups
        expect(1 <= top_k <= allowed_k, f"top_k: expected 1 to {allowed_k}, found {top_k}")
    for name in ("epsilon", "floor"):
        expect(args.get(name, 0.0) >= 0, f"{name}: expected at least 0, found {args.get(name)}")
    weights = TensorType(args["dtype"], (logits.shape[0], top_k))
    expect_dtype("dtype", weights, *COMPUTED)
    return (weights, TensorType("int64", weights.shape))


def grouped_linear(args: Args) -> tuple[TensorType, ...]:
    x, weight, bias, ids = args["x"], args["weight"], args.get("bias"), args["expert_ids"]
    expect_rank("x", x, 2)
    expect_rank("weight", weight, 3)
    expect_dtype("x", x, *COMPUTED)
    expect_dtype("weight", weight, x.dtype)
    expect_shape("x's last dimension", x.shape[1:], weight.shape[2:])
    if bias is not None:
        expect_shape("bias", bias.shape, weight.shape[:2])
        expect_dtype("bias", bias, x.dtype)
    expect_shape("expert_ids", ids.shape, x.shape[:1])
    expect_dtype("expert_ids", ids, "int64")
    return (TensorType(x.dtype, (x.shape[0], weight.shape[1])),)


def experts(args: Args) -> tuple[TensorType, ...]:
    x, ids, weights, up, down = (args[name] for name in ("x", "expert_ids", "expert_weights", "up", "down"))
    expect_rank("x", x, 2)
    expect_rank("expert_ids", ids, 2)
    expect_rank("up", up, 3)
    expect_dtype("x", x, *COMPUTED)
    expect_dtype("expert_ids", ids, "int64")
    expect_dtype("expert_weights", weights, *COMPUTED)
    expect_dtype("up", up, x.dtype)
    expect_dtype("down", down, x.dtype)
    expect_shape("expert_ids, but for its last dimension", ids.shape[:1], x.shape[:1])
    expect_shape("expert_weights", weights.shape, ids.shape)
    expect_shape("up's last dimension", up.shape[2:], x.shape[1:])
    inner = up.shape[1]
    if args["gated"]:
        half = symbols.floordiv(inner, 2)
        even = symbols.equal(symbols.mul(half, 2), inner)
        expect(even, f"up: expected gate and up in one, found {symbols.text(inner)} rows")
        inner = half
    expect_shape("down", down.shape, (up.shape[0], x.shape[1], inner))
    for name, shape in (("up_bias", up.shape[:2]), ("down_bias", down.shape[:2])):
        if args.get(name) is not None:
            expect_shape(name, args[name].shape, shape)
            expect_dtype(name, args[name], x.dtype)
    expect_one_of("activation", args["activation"], EXPERT_ACTIVATIONS)
    limit = args.get("limit")
    expect(limit is None or limit > 0, f"limit: expected None or more than 0, found {limit}")
    return (x,)


ROWS = (
    row(
        "precast.route(Tensor logits, Tensor? bias, *, str scoring, int top_k, str choice='scores', int num_groups=1,"
        " int top_groups=1, str group_score='top2', bool normalise, float epsilon=0.0, float floor=0.0,"
        " float scale=1.0, Dtype dtype) -> (Tensor, Tensor)",
        route,
        last_of("logits"),
    ),
    row(
        "precast.grouped_linear(Tensor x, Tensor weight, Tensor? bias, Tensor expert_ids) -> Tensor",
        grouped_linear,
        last_of("x"),
        work.product("x"),
        integers={"expert_ids": Integers("any", "weight")},
    ),
    row(
        "precast.experts(Tensor x, Tensor expert_ids, Tensor expert_weights, Tensor up, Tensor down, Tensor? up_bias,"
        " Tensor? down_bias, *, str activation, bool gated, float alpha=1.0, float? limit=None, float offset=0.0)"
        " -> Tensor",
        experts,
        last_of("x"),
        work.experts,
        integers={"expert_ids": Integers("any", "up")},
    ),
)
