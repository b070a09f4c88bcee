"""Shape rules of mixtures of experts: choosing experts, their products, and the ops that routers are written in."""

from __future__ import annotations

from precast.ir.graph.schema import Expr, TensorType
from precast.ir.ops.rules import (
    COMPUTED,
    FLOATS,
    INTEGERS,
    Args,
    _axis,
    _dtype,
    _expect,
    _promote,
    _rank,
    _same,
    broadcast,
)

EXPERT_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
SCORINGS = ("softmax", "sigmoid", "sqrt_softplus")
CHOICES = ("scores", "logits")
GROUP_SCORES = ("top2", "max")


# --- precast ---------------------------------------------------------------------------------------------------


def route(args: Args) -> tuple[TensorType, ...]:
    logits, bias = args["logits"], args.get("bias")
    _rank("logits", logits, 2)
    _dtype("logits", logits, *COMPUTED)
    experts, top_k = logits.shape[1], args["top_k"]
    if bias is not None:
        _same("bias", bias.shape, (experts,))
        _dtype("bias", bias, *COMPUTED)
    for name, allowed in (("scoring", SCORINGS), ("choice", CHOICES), ("group_score", GROUP_SCORES)):
        value = args.get(name, allowed[0])
        _expect(value in allowed, f"{name}: expected one of {', '.join(allowed)}, found {value!r}")
    groups, top_groups = args.get("num_groups", 1), args.get("top_groups", 1)
    _expect(1 <= top_groups <= groups, f"top_groups: expected 1 to {groups}, found {top_groups}")
    if isinstance(experts, int):
        _expect(experts % groups == 0, f"num_groups: {experts} experts are no multiple of {groups}")
        least = 2 if groups > 1 and args.get("group_score", "top2") == "top2" else 1
        _expect(experts // groups >= least, f"num_groups: expected groups of at least {least}, found {groups} groups")
        allowed_k = experts // groups * top_groups
        _expect(1 <= top_k <= allowed_k, f"top_k: expected 1 to {allowed_k}, found {top_k}")
    for name in ("epsilon", "floor"):
        _expect(args.get(name, 0.0) >= 0, f"{name}: expected at least 0, found {args.get(name)}")
    weights = TensorType(args["dtype"], (logits.shape[0], top_k))
    _dtype("dtype", weights, *COMPUTED)
    return (weights, TensorType("int64", weights.shape))


def grouped_linear(args: Args) -> tuple[TensorType, ...]:
    x, weight, bias, ids = args["x"], args["weight"], args.get("bias"), args["expert_ids"]
    _rank("x", x, 2)
    _rank("weight", weight, 3)
    _dtype("x", x, *COMPUTED)
    _dtype("weight", weight, x.dtype)
    _same("x's last dimension", x.shape[1:], weight.shape[2:])
    if bias is not None:
        _same("bias", bias.shape, weight.shape[:2])
        _dtype("bias", bias, x.dtype)
    _same("expert_ids", ids.shape, x.shape[:1])
    _dtype("expert_ids", ids, "int64")
    return (TensorType(x.dtype, (x.shape[0], weight.shape[1])),)


def experts(args: Args) -> tuple[TensorType, ...]:
    x, ids, weights, up, down = (args[name] for name in ("x", "expert_ids", "expert_weights", "up", "down"))
    _rank("x", x, 2)
    _rank("expert_ids", ids, 2)
    _rank("up", up, 3)
    _dtype("x", x, *COMPUTED)
    _dtype("expert_ids", ids, "int64")
    _dtype("expert_weights", weights, *COMPUTED)
    _dtype("up", up, x.dtype)
    _dtype("down", down, x.dtype)
    _same("expert_ids, but for its last dimension", ids.shape[:1], x.shape[:1])
    _same("expert_weights", weights.shape, ids.shape)
    _same("up's last dimension", up.shape[2:], x.shape[1:])
    inner = up.shape[1]
    if args["gated"]:
        _expect(isinstance(inner, int) and inner % 2 == 0, f"up: expected gate and up in one, found {inner} rows")
        assert isinstance(inner, int)
        inner //= 2
    _same("down", down.shape, (up.shape[0], x.shape[1], inner))
    for name, shape in (("up_bias", up.shape[:2]), ("down_bias", down.shape[:2])):
        if args.get(name) is not None:
            _same(name, args[name].shape, shape)
            _dtype(name, args[name], x.dtype)
    kind = args["activation"]
    _expect(kind in EXPERT_ACTIVATIONS, f"activation: expected one of {', '.join(EXPERT_ACTIVATIONS)}, found {kind!r}")
    limit = args.get("limit")
    _expect(limit is None or limit > 0, f"limit: expected None or more than 0, found {limit}")
    return (x,)


# --- aten ------------------------------------------------------------------------------------------------------


def topk(args: Args) -> tuple[TensorType, ...]:
    x, k = args["self"], args["k"]
    _dtype("self", x, *COMPUTED)
    _expect(len(x.shape) > 0, "self: expected at least one dimension")
    dim = _axis(args.get("dim", -1), len(x.shape))
    size = x.shape[dim]
    _expect(isinstance(k, int) and k >= 0, f"k: expected a count, found {k}")
    _expect(not isinstance(size, int) or k <= size, f"k: expected at most {size}, found {k}")
    shape = (*x.shape[:dim], k, *x.shape[dim + 1 :])
    return (TensorType(x.dtype, shape), TensorType("int64", shape))


def sort(args: Args) -> tuple[TensorType, ...]:
    x = args["self"]
    _dtype("self", x, *INTEGERS, *COMPUTED)
    _axis(args.get("dim", -1), len(x.shape))
    return (x, TensorType("int64", x.shape))


def max_dim(args: Args) -> tuple[TensorType, ...]:
    values = _reduced(args)
    return (values, TensorType("int64", values.shape))


def argmax(args: Args) -> tuple[TensorType, ...]:
    return (TensorType("int64", _reduced(args).shape),)


def _reduced(args: Args) -> TensorType:
    """Over one dimension, which isn't empty: the largest of nothing is nothing."""
    x = args["self"]
    _dtype("self", x, *COMPUTED, *(name for name in INTEGERS if name != "bool"))
    _expect(len(x.shape) > 0, "self: expected at least one dimension")
    dim = _axis(args["dim"], len(x.shape))
    _expect(x.shape[dim] != 0, f"dim: dimension {dim} has no elements")
    kept = (1,) if args.get("keepdim") else ()
    return TensorType(x.dtype, (*x.shape[:dim], *kept, *x.shape[dim + 1 :]))


def cumsum(args: Args) -> tuple[TensorType, ...]:
    x = args["self"]
    _axis(args["dim"], len(x.shape))
    wanted = args.get("dtype") or (x.dtype if x.dtype in FLOATS else "int64")
    result = TensorType(wanted, x.shape)  # type: ignore[arg-type]
    _dtype("self", x, *INTEGERS, *COMPUTED)
    _dtype("dtype, or self", result, *COMPUTED, *(name for name in INTEGERS if name != "bool"))
    return (result,)


def gather(args: Args) -> tuple[TensorType, ...]:
    x, index = args["self"], args["index"]
    _along(x, args["dim"], index)
    return (TensorType(x.dtype, index.shape),)


def scatter_src(args: Args) -> tuple[TensorType, ...]:
    x, index, src = args["self"], args["index"], args["src"]
    dim = _along(x, args["dim"], index)
    _dtype("src", src, x.dtype)
    _rank("src", src, len(index.shape))
    for axis, (found, needed) in enumerate(zip(src.shape, index.shape, strict=True)):
        _at_most("index", axis, needed, found)
        if axis != dim:
            _at_most("index", axis, needed, x.shape[axis])
    return (x,)


def scatter_value(args: Args) -> tuple[TensorType, ...]:
    _along(args["self"], args["dim"], args["index"])
    return (args["self"],)


def _along(x: TensorType, dim: object, index: TensorType) -> int:
    """The dimension in which `index` names elements of `x`; it has no more than `x` in the others."""
    _dtype("index", index, "int64")
    _dtype("self", x, *INTEGERS, *COMPUTED)
    _expect(len(x.shape) > 0, "self: expected at least one dimension")
    _rank("index", index, len(x.shape))
    axis = _axis(dim, len(x.shape))
    for other, (found, most) in enumerate(zip(index.shape, x.shape, strict=True)):
        if other != axis:
            _at_most("index", other, found, most)
    return axis


def _at_most(name: str, axis: int, found: Expr, most: Expr) -> None:
    if isinstance(found, int) and isinstance(most, int):
        _expect(found <= most, f"{name}: expected at most {most} in dimension {axis}, found {found}")
    else:
        _same(f"{name}'s dimension {axis}", (found,), (most,))


def one_hot(args: Args) -> tuple[TensorType, ...]:
    x, classes = args["self"], args.get("num_classes", -1)
    _dtype("self", x, "int64")
    _expect(isinstance(classes, int) and classes > 0, f"num_classes: expected a count, found {classes}")
    return (TensorType("int64", (*x.shape, classes)),)


def masked_fill(args: Args) -> tuple[TensorType, ...]:
    x, mask, value = args["self"], args["mask"], args["value"]
    _dtype("mask", mask, "bool")
    _dtype("self", x, *INTEGERS, *COMPUTED)
    _expect(_promote((x, value)) == x.dtype, f"value: {value} is of a higher kind than {x.dtype}")
    _same("mask, broadcast", broadcast(mask.shape, x.shape), x.shape)
    return (x,)


def where(args: Args) -> tuple[TensorType, ...]:
    condition, x, other = args["condition"], args["self"], args["other"]
    _dtype("condition", condition, "bool")
    shape = broadcast(condition.shape, x.shape, other.shape)
    return (TensorType(_promote((x, other)), shape),)  # type: ignore[arg-type]


def compare(args: Args) -> tuple[TensorType, ...]:
    operands = [value for value in args.values() if isinstance(value, TensorType)]
    _promote(list(args.values()))  # refuses what can't be combined
    for operand in operands:
        _dtype("self, other", operand, *INTEGERS, *COMPUTED)
    return (TensorType("bool", broadcast(*(operand.shape for operand in operands))),)


def full_like(args: Args) -> tuple[TensorType, ...]:
    _dtype("self", args["self"], *INTEGERS, *COMPUTED)
    return (args["self"],)


def logical_not(args: Args) -> tuple[TensorType, ...]:
    _dtype("self", args["self"], *INTEGERS, *COMPUTED)
    return (TensorType("bool", args["self"].shape),)


def bitwise_not(args: Args) -> tuple[TensorType, ...]:
    _dtype("self", args["self"], *INTEGERS)
    return (args["self"],)
