"""Shape rules of the ops that keep a state: convolution, state space scans, delta rule, linear attention,
linear recurrence, RWKV.

Each has a cache-free form, where every sequence starts from zero, and a stateful one, which reads and writes the slots
of a state tensor. Rules and checks are written as in `precast.ir.ops.rules`.
"""

from __future__ import annotations

from precast.ir.graph import symbols
from precast.ir.graph.schema import Expr, TensorType
from precast.ir.ops.rules import COMPUTED, Args, _dtype, _expect, _rank, _same, _shape_text

CONV_ACTIVATIONS = ("none", "silu")
RECURRENCES = ("sum", "max")


def causal_conv(args: Args) -> tuple[TensorType, ...]:
    _bounds(args)
    return (_conv(args),)


def stateful_causal_conv(args: Args) -> tuple[TensorType, ...]:
    x = _conv(args)
    width = symbols.add(args["weight"].shape[1], -1)
    _state(args, (x.shape[2], width), x.dtype)
    return (x,)


def selective_scan(args: Args) -> tuple[TensorType, ...]:
    _bounds(args)
    return (_selective(args),)


def stateful_selective_scan(args: Args) -> tuple[TensorType, ...]:
    x = _selective(args)
    _state(args, args["a"].shape, "float32")
    return (x,)


def state_space_scan(args: Args) -> tuple[TensorType, ...]:
    _bounds(args)
    return (_state_space(args),)


def stateful_state_space_scan(args: Args) -> tuple[TensorType, ...]:
    x = _state_space(args)
    _state(args, (*x.shape[2:], args["b"].shape[3]), "float32")
    return (x,)


def delta_rule(args: Args) -> tuple[TensorType, ...]:
    _bounds(args)
    return (_delta(args),)


def stateful_delta_rule(args: Args) -> tuple[TensorType, ...]:
    y = _delta(args)
    _state(args, (y.shape[2], args["q"].shape[3], y.shape[3]), "float32")
    return (y,)


def linear_attention(args: Args) -> tuple[TensorType, ...]:
    _bounds(args)
    return (_linear(args),)


def stateful_linear_attention(args: Args) -> tuple[TensorType, ...]:
    y = _linear(args)
    _state(args, (y.shape[2], args["q"].shape[3], y.shape[3]), "float32")
    return (y,)


def linear_recurrence(args: Args) -> tuple[TensorType, ...]:
    _bounds(args)
    return (_recurrence(args),)


def stateful_linear_recurrence(args: Args) -> tuple[TensorType, ...]:
    x = _recurrence(args)
    _state(args, x.shape[2:], "float32")
    return (x,)


def wkv(args: Args) -> tuple[TensorType, ...]:
    _bounds(args)
    return (_wkv(args),)


def stateful_wkv(args: Args) -> tuple[TensorType, ...]:
    v = _wkv(args)
    _state(args, (3, *v.shape[2:]), "float32")
    return (v,)


# --- the tokens ------------------------------------------------------------------------------------------------


def _conv(args: Args) -> TensorType:
    x, weight = args["x"], args["weight"]
    _tokens("x", x, 3)
    _rank("weight", weight, 2)
    _floating("weight", weight, (x.shape[2], weight.shape[1]))
    _expect(weight.shape[1] != 0, f"weight: expected at least one tap, found {_shape_text(weight.shape)}")
    if args.get("bias") is not None:
        _floating("bias", args["bias"], x.shape[2:])
    kind = args.get("activation", "none")
    _expect(kind in CONV_ACTIVATIONS, f"activation: expected one of {', '.join(CONV_ACTIVATIONS)}, found {kind!r}")
    return x


def _selective(args: Args) -> TensorType:
    x, a, b = args["x"], args["a"], args["b"]
    _tokens("x", x, 3)
    _rank("a", a, 2)
    channels = x.shape[2:]
    _floating("dt", args["dt"], x.shape)
    _floating("a", a, (*channels, a.shape[1]))
    _floating("b", b, (*x.shape[:2], a.shape[1]))
    _floating("c", args["c"], b.shape)
    _skip_and_bias(args, channels)
    return x


def _state_space(args: Args) -> TensorType:
    x, b = args["x"], args["b"]
    _tokens("x", x, 4)
    _tokens("b", b, 4)
    _floating("dt", args["dt"], x.shape[:3])
    _floating("a", args["a"], x.shape[2:3])
    _floating("b", b, (*x.shape[:2], *b.shape[2:]))
    _floating("c", args["c"], b.shape)
    _multiple("x", x.shape[2], b.shape[2])
    _skip_and_bias(args, x.shape[2:3])
    low, high = args["dt_min"], args["dt_max"]
    _expect(low <= high, f"dt_min, dt_max: expected a range, found {low}..{high}")
    return x


def _delta(args: Args) -> TensorType:
    q, v = args["q"], args["v"]
    y = _queries(args)
    _multiple("v", v.shape[2], q.shape[2])
    decay = args.get("decay")
    if decay is not None:
        _decay(decay, (v.shape[:3], (*v.shape[:3], q.shape[3])))
    _floating("beta", args["beta"], v.shape[:3])
    return y


def _linear(args: Args) -> TensorType:
    q, v, decay = args["q"], args["v"], args.get("decay")
    y = _queries(args)
    _same("v's heads", v.shape[:3], q.shape[:3])
    if decay is not None:
        _decay(decay, (q.shape[2:3], q.shape[:3], q.shape))
    return y


def _recurrence(args: Args) -> TensorType:
    x = args["x"]
    _tokens("x", x, 3)
    _floating("factor", args["factor"], x.shape)
    kind = args.get("kind", "sum")
    _expect(kind in RECURRENCES, f"kind: expected one of {', '.join(RECURRENCES)}, found {kind!r}")
    return x


def _wkv(args: Args) -> TensorType:
    v = args["v"]
    _tokens("v", v, 3)
    _floating("k", args["k"], v.shape)
    for name in ("decay", "first"):
        _floating(name, args[name], v.shape[2:])
    return v


def _queries(args: Args) -> TensorType:
    q, v = args["q"], args["v"]
    _tokens("q", q, 4)
    _tokens("v", v, 4)
    _floating("k", args["k"], q.shape)
    _same("v's tokens", v.shape[:2], q.shape[:2])
    return TensorType(q.dtype, v.shape)


def _skip_and_bias(args: Args, channels: tuple[Expr, ...]) -> None:
    for name in ("d", "dt_bias"):
        if args.get(name) is not None:
            _floating(name, args[name], channels)


def _decay(decay: TensorType, allowed: tuple[tuple[Expr, ...], ...]) -> None:
    expected = next((shape for shape in allowed if len(shape) == len(decay.shape)), allowed[-1])
    _floating("decay", decay, expected)


# --- the states ------------------------------------------------------------------------------------------------


def _bounds(args: Args) -> None:
    _rank("cu_seqlens", args["cu_seqlens"], 1)
    _dtype("cu_seqlens", args["cu_seqlens"], "int32")


def _state(args: Args, shape: tuple[Expr, ...], dtype: str) -> None:
    """State slots of this shape, and the metadata that says which sequence has which."""
    state, slots = args["state"], args["slots"]
    _rank("state", state, len(shape) + 1)
    _same("state, but for its slots", state.shape[1:], shape)
    _dtype("state", state, dtype)
    _rank("slots", slots, 1)
    _same("kv_lens", args["kv_lens"].shape, slots.shape)
    _same("cu_seqlens", args["cu_seqlens"].shape, (symbols.add(slots.shape[0], 1),))
    for name in ("slots", "cu_seqlens", "kv_lens"):
        _dtype(name, args[name], "int32")


# --- checks ----------------------------------------------------------------------------------------------------


def _floating(name: str, tensor: TensorType, shape: tuple[Expr, ...]) -> None:
    _same(name, tensor.shape, shape)
    _dtype(name, tensor, *COMPUTED)


def _tokens(name: str, tensor: TensorType, rank: int) -> None:
    """Packed tokens [1, T, ...] of `rank` dimensions."""
    _rank(name, tensor, rank)
    _same(f"{name}'s first dimension", tensor.shape[:1], (1,))
    _dtype(name, tensor, *COMPUTED)


def _multiple(name: str, heads: Expr, groups: Expr) -> None:
    if isinstance(heads, int) and isinstance(groups, int):
        _expect(groups > 0 and heads % groups == 0, f"{name}: {heads} heads are no multiple of {groups}")
