"""Ops that keep a state: convolution, state space scans, delta rule, linear attention, linear recurrence, RWKV.

Each has two forms: one without caches, where every sequence starts from zero, and a stateful one, which reads and
writes the slots of a state tensor. `_both` makes the rows of both.
"""

from __future__ import annotations

from collections.abc import Callable

from precast.ir.graph import symbols
from precast.ir.graph.schema import Expr, TensorType
from precast.ir.graph.symbols import shape_text
from precast.ir.ops.checks import (
    COMPUTED,
    expect,
    expect_dtype,
    expect_floating,
    expect_given,
    expect_known,
    expect_one_of,
    expect_rank,
    expect_shape,
    expect_tokens,
    expect_vector,
)
from precast.ir.ops.op import GROUP, SEQUENCE_BOUNDS, SEQUENCE_LENGTHS, SEQUENCES, Args, OpDef, State, row
from precast.ir.ops.work import Work, each

CONV_ACTIVATIONS = ("none", "silu")
RECURRENCES = ("sum", "max")


def causal_conv(args: Args) -> TensorType:
    x, weight = args["x"], args["weight"]
    expect_tokens("x", x, 3)
    expect_rank("weight", weight, 2)
    expect_floating("weight", weight, (x.shape[2], weight.shape[1]))
    expect(weight.shape[1] != 0, f"weight: expected at least one tap, found {shape_text(weight.shape)}")
    expect_given(args, "bias", x.shape[2:], *COMPUTED)
    expect_one_of("activation", args.get("activation", "none"), CONV_ACTIVATIONS)
    return x


def compress(args: Args) -> TensorType:
    kv, bias = args["kv"], args["bias"]
    expect_tokens("kv", kv, 3)
    expect_floating("gate", args["gate"], kv.shape)
    expect_rank("bias", bias, 2)
    width, size = bias.shape
    expect_known("channels", kv.shape[2], width, size)
    expect_floating("bias", bias, (width, size))
    channels = (kv.shape[2], symbols.mul(2, size))
    expect(
        any(symbols.equal(kv.shape[2], each) for each in (size, channels[1])),
        f"kv: expected as many channels as bias, or twice as many, found {shape_text(kv.shape)} and "
        f"{shape_text(bias.shape)}",
    )
    overlaps = not symbols.equal(kv.shape[2], size)
    least = 4 if overlaps else 2
    ok = not isinstance(width, int) or (width >= least and width % (2 if overlaps else 1) == 0)
    twice = ", twice" if overlaps else ""
    expect(ok, f"bias: expected blocks of at least 2 tokens{twice}, found {shape_text((width,))}")
    return TensorType(kv.dtype, (*kv.shape[:2], size))


def selective_scan(args: Args) -> TensorType:
    x, a, b = args["x"], args["a"], args["b"]
    expect_tokens("x", x, 3)
    expect_rank("a", a, 2)
    channels = x.shape[2:]
    expect_floating("dt", args["dt"], x.shape)
    expect_floating("a", a, (*channels, a.shape[1]))
    expect_floating("b", b, (*x.shape[:2], a.shape[1]))
    expect_floating("c", args["c"], b.shape)
    expect_given(args, "d", channels, *COMPUTED)
    expect_given(args, "dt_bias", channels, *COMPUTED)
    return x


def state_space_scan(args: Args) -> TensorType:
    x, b = args["x"], args["b"]
    expect_tokens("x", x, 4)
    expect_tokens("b", b, 4)
    expect_floating("dt", args["dt"], x.shape[:3])
    expect_floating("a", args["a"], x.shape[2:3])
    expect_floating("b", b, (*x.shape[:2], *b.shape[2:]))
    expect_floating("c", args["c"], b.shape)
    _multiple("x", x.shape[2], b.shape[2])
    expect_given(args, "d", x.shape[2:3], *COMPUTED)
    expect_given(args, "dt_bias", x.shape[2:3], *COMPUTED)
    low, high = args["dt_min"], args["dt_max"]
    expect(low <= high, f"dt_min, dt_max: expected a range, found {low}..{high}")
    return x


def delta_rule(args: Args) -> TensorType:
    q, v = args["q"], args["v"]
    y = _queries(args)
    _multiple("v", v.shape[2], q.shape[2])
    decay = args.get("decay")
    if decay is not None:
        _decay(decay, (v.shape[:3], (*v.shape[:3], q.shape[3])))
    expect_floating("beta", args["beta"], v.shape[:3])
    return y


def linear_attention(args: Args) -> TensorType:
    q, v, decay = args["q"], args["v"], args.get("decay")
    y = _queries(args)
    expect_shape("v's heads", v.shape[:3], q.shape[:3])
    if decay is not None:
        _decay(decay, (q.shape[2:3], q.shape[:3], q.shape))
    return y


def linear_recurrence(args: Args) -> TensorType:
    x = args["x"]
    expect_tokens("x", x, 3)
    expect_floating("factor", args["factor"], x.shape)
    expect_one_of("kind", args.get("kind", "sum"), RECURRENCES)
    return x


def wkv(args: Args) -> TensorType:
    v = args["v"]
    expect_tokens("v", v, 3)
    expect_floating("k", args["k"], v.shape)
    for name in ("decay", "first"):
        expect_floating(name, args[name], v.shape[2:])
    return v


def _queries(args: Args) -> TensorType:
    q, v = args["q"], args["v"]
    expect_tokens("q", q, 4)
    expect_tokens("v", v, 4)
    expect_floating("k", args["k"], q.shape)
    expect_shape("v's tokens", v.shape[:2], q.shape[:2])
    return TensorType(q.dtype, v.shape)


def _decay(decay: TensorType, allowed: tuple[tuple[Expr, ...], ...]) -> None:
    expected = next((shape for shape in allowed if len(shape) == len(decay.shape)), allowed[-1])
    expect_floating("decay", decay, expected)


def _multiple(name: str, heads: Expr, groups: Expr) -> None:
    expect_known(name, heads, groups)
    if isinstance(heads, int) and isinstance(groups, int):
        expect(groups > 0 and heads % groups == 0, f"{name}: {heads} heads are no multiple of {groups}")


def _both(
    name: str, tensors: str, options: str, result: Callable[[Args], TensorType], state: State, work: Work
) -> tuple[OpDef, OpDef]:
    """The rows of an op and its stateful form; `result` checks the tokens and gives the op's one result."""

    def from_zero(args: Args) -> tuple[TensorType, ...]:
        expect_vector("cu_seqlens", args["cu_seqlens"], "int32")
        return (result(args),)

    def from_state(args: Args) -> tuple[TensorType, ...]:
        y = result(args)
        held, slots, shape = args["state"], args["slots"], state.shape(args)
        expect_rank("state", held, len(shape) + 1)
        expect_shape("state, but for its slots", held.shape[1:], shape)
        expect_dtype("state", held, y.dtype if state.kind == "conv" else "float32")
        expect_rank("slots", slots, 1)
        expect_shape("kv_lens", args["kv_lens"].shape, slots.shape)
        expect_shape("cu_seqlens", args["cu_seqlens"].shape, (symbols.add(slots.shape[0], 1),))
        for metadata in ("slots", "cu_seqlens", "kv_lens"):
            expect_dtype(metadata, args[metadata], "int32")
        return (y,)

    held = "Tensor(a!) state, Tensor slots, Tensor cu_seqlens, Tensor kv_lens"
    return (
        row(
            f"precast.{name}({tensors}, Tensor cu_seqlens{options}) -> Tensor",
            from_zero,
            SEQUENCES,
            work,
            state=state,
            integers=SEQUENCE_BOUNDS,
        ),
        row(
            f"precast.stateful_{name}({tensors}, {held}{options}) -> Tensor",
            from_state,
            SEQUENCES,
            work,
            integers=SEQUENCE_LENGTHS | {"slots": GROUP},
        ),
    )


_KEY_VALUE = State("state", lambda args: (args["v"].shape[2], args["q"].shape[3], args["v"].shape[3]))

ROWS = (
    *_both(
        "causal_conv",
        "Tensor x, Tensor weight, Tensor? bias",
        ", *, str activation='none'",
        causal_conv,
        State("conv", lambda args: (args["x"].shape[2], symbols.add(args["weight"].shape[1], -1))),
        each(2, "x", by="weight"),
    ),
    # of as many tokens as the bias has rows, at the last of a block: score, weight, sum
    *_both(
        "compress",
        "Tensor kv, Tensor gate, Tensor bias",
        "",
        compress,
        State("conv", lambda args: (2, args["bias"].shape[0], args["kv"].shape[2])),
        each(6, "kv"),
    ),
    # decay, input and its addition, output, for each element of the state and token
    *_both(
        "selective_scan",
        "Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? dt_bias",
        ", *, bool softplus",
        selective_scan,
        State("state", lambda args: args["a"].shape),
        each(6, "x", by="b"),
    ),
    *_both(
        "state_space_scan",
        "Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? dt_bias",
        ", *, bool softplus, float dt_min, float dt_max",
        state_space_scan,
        State("state", lambda args: (*args["x"].shape[2:], args["b"].shape[3])),
        each(6, "x", by="b"),
    ),
    # as a scan, and what the state already holds for the key
    *_both(
        "delta_rule",
        "Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor beta",
        ", *, float scale, bool normalise",
        delta_rule,
        _KEY_VALUE,
        each(8, "v", by="k"),
    ),
    *_both(
        "linear_attention",
        "Tensor q, Tensor k, Tensor v, Tensor? decay",
        ", *, float scale",
        linear_attention,
        _KEY_VALUE,
        each(6, "v", by="k"),
    ),
    *_both(
        "linear_recurrence",
        "Tensor x, Tensor factor",
        ", *, str kind='sum'",
        linear_recurrence,
        State("state", lambda args: args["x"].shape[2:]),
        each(2, "x"),
    ),
    # of both sums: decay, addition, and the token's own; their quotient
    *_both(
        "wkv",
        "Tensor k, Tensor v, Tensor decay, Tensor first",
        "",
        wkv,
        State("state", lambda args: (3, *args["v"].shape[2:])),
        each(8, "v"),
    ),
)
