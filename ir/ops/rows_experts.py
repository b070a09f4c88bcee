"""Mixtures of experts: the choice of experts, and products with one of several weights for each row."""

from __future__ import annotations

from collections.abc import Sequence

from precast.ir.errors import RecipeError
from precast.ir.graph import symbols
from precast.ir.graph.schema import Dtype, Expr, TensorType
from precast.ir.graph.symbols import shape_text
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
from precast.ir.ops.op import Args, Integers, ShapeError, last_of, row
from precast.ir.ops.rows_tokens import QUANTISED_FORMATS
from precast.ir.weights import quantised

EXPERT_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
SCORINGS = ("softmax", "sigmoid", "sqrt_softplus")
CHOICES = ("scores", "logits")
GROUP_SCORES = ("top2", "max")
SCALES: tuple[Dtype, ...] = ("float32", "bfloat16", "float16")
EXPERT_ROUNDINGS = ("none", "fp8_token", "fp8_group", "fp8_group_e8m0", "int8_token")
"""How rows that experts multiply are rounded: as `precast.quantised_linear` has it, by scales made of a row."""
EXPERT_FORMATS = tuple(format for format in QUANTISED_FORMATS if format != "gptq")
"""How weights may be stored: as of `precast.quantised_linear`, but without lists of groups, with which `gptq` comes."""


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
    x, up, down = args["x"], args["up"], args["down"]
    _expect_chosen(args)
    expect_rank("up", up, 3)
    expect_dtype("up", up, x.dtype)
    expect_dtype("down", down, x.dtype)
    expect_shape("up's last dimension", up.shape[2:], x.shape[1:])
    expect_shape("down", down.shape, (up.shape[0], x.shape[1], _inner(up.shape[1], args)))
    _expect_between(args, up.shape[:2])
    return (x,)


def quantised_experts(args: Args) -> tuple[TensorType, ...]:
    x = args["x"]
    _expect_chosen(args)
    expect_one_of("format", args["format"], EXPERT_FORMATS)
    experts, opened, inputs = _dequantised("up", args)
    expect_shape("up's last dimension, dequantised", (inputs,), x.shape[1:])
    expect_shape("down, dequantised", _dequantised("down", args), (experts, x.shape[1], _inner(opened, args)))
    expect_one_of("rounding", args.get("rounding", "none"), EXPERT_ROUNDINGS)
    _expect_between(args, (experts, opened))
    return (x,)


def _dequantised(name: str, args: Args) -> tuple[Expr, Expr, Expr]:
    """Experts, outputs and inputs of a weight whose parts, `name` and those called after it, are in few bits."""
    format, parts = args["format"], {"of": args[name], "scales": args[f"{name}_scales"]}
    parts |= {part: args[f"{name}_{part}"] for part in ("zeros", "global_scale") if args.get(f"{name}_{part}")}
    experts = parts["of"].shape[:1]
    for part, kind in parts.items():
        expect_shape(f"{name}'s {part}: experts", kind.shape[:1], experts)
    sizes = {part: kind.shape[1:] for part, kind in parts.items()}
    try:
        shape = quantised.shape_in_op(format, sizes, args.get(f"{name}_block"), args.get("zero_offset", 0))
    except RecipeError as error:
        raise ShapeError(f"{name}: {error}") from error
    expect(len(shape) == 2, f"{name}: expected a matrix for each expert, found {shape_text(shape)}")
    expect_dtype(name, parts["of"], quantised.stored_dtype(format))
    expect_dtype(f"{name}_scales", parts["scales"], *quantised.scales_dtypes(format))
    for part, dtypes in (("zeros", ("int8",) if format == "int8" else ("int32",)), ("global_scale", SCALES)):
        if part in parts:
            expect_dtype(f"{name}_{part}", parts[part], *dtypes)
    return experts[0], shape[0], shape[1]


def _expect_chosen(args: Args) -> None:
    """Tokens, and the experts that each of them has, with their weights."""
    x, ids, weights = (args[name] for name in ("x", "expert_ids", "expert_weights"))
    expect_rank("x", x, 2)
    expect_rank("expert_ids", ids, 2)
    expect_dtype("x", x, *COMPUTED)
    expect_dtype("expert_ids", ids, "int64")
    expect_dtype("expert_weights", weights, *COMPUTED)
    expect_shape("expert_ids, but for its last dimension", ids.shape[:1], x.shape[:1])
    expect_shape("expert_weights", weights.shape, ids.shape)


def _inner(opened: Expr, args: Args) -> Expr:
    """The size between the products, of the rows of the first one."""
    if not args["gated"]:
        return opened
    half = symbols.floordiv(opened, 2)
    even = symbols.equal(symbols.mul(half, 2), opened)
    expect(even, f"up: expected gate and up in one, found {symbols.text(opened)} rows")
    return half


def _expect_between(args: Args, opened: Sequence[Expr]) -> None:
    """The biases, and what stands between the products. `opened`: experts, and rows of the first one."""
    x = args["x"]
    for name, shape in (("up_bias", opened), ("down_bias", (opened[0], x.shape[1]))):
        if args.get(name) is not None:
            expect_shape(name, args[name].shape, shape)
            expect_dtype(name, args[name], x.dtype)
    expect_one_of("activation", args["activation"], EXPERT_ACTIVATIONS)
    limit = args.get("limit")
    expect(limit is None or limit > 0, f"limit: expected None or more than 0, found {limit}")


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
    row(
        "precast.quantised_experts(Tensor x, Tensor expert_ids, Tensor expert_weights, Tensor up, Tensor down,"
        " Tensor up_scales, Tensor down_scales, Tensor? up_zeros, Tensor? down_zeros, Tensor? up_global_scale,"
        " Tensor? down_global_scale, Tensor? up_bias, Tensor? down_bias, *, str format, int[]? up_block=None,"
        " int[]? down_block=None, int zero_offset=0, str activation, bool gated, float alpha=1.0, float? limit=None,"
        " float offset=0.0, str rounding='none') -> Tensor",
        quantised_experts,
        last_of("x"),
        work.quantised_experts,
        integers={"expert_ids": Integers("any", "up")},
    ),
)
