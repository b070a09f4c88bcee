"""The shape rules of ops with a state: what they give, over symbolic sizes, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from precast.ir.graph.schema import Apply, Dtype, Expr, TensorType
from precast.ir.ops import table as ops
from precast.ir.ops.op import ShapeError

Args = dict[str, Any]


def f32(*shape: Expr) -> TensorType:
    return TensorType("float32", shape)


def i32(*shape: Expr) -> TensorType:
    return TensorType("int32", shape)


BOUNDS = {"cu_seqlens": i32(Apply("add", ("B", 1)))}
METADATA = BOUNDS | {"slots": i32("B"), "kv_lens": i32("B")}
SCAN = {"d": None, "dt_bias": f32(6), "softplus": True}
TOKENS: dict[str, Args] = {
    "compress": {"kv": f32(1, "T", 12), "gate": f32(1, "T", 12), "bias": f32(8, 6)},
    "causal_conv": {"x": f32(1, "T", 6), "weight": f32(6, 4), "bias": f32(6), "activation": "silu"},
    "selective_scan": {
        "x": f32(1, "T", 6), "dt": f32(1, "T", 6), "a": f32(6, 5), "b": f32(1, "T", 5), "c": f32(1, "T", 5), **SCAN,
    },
    "state_space_scan": {
        "x": f32(1, "T", 6, 4), "dt": f32(1, "T", 6), "a": f32(6), "b": f32(1, "T", 2, 5), "c": f32(1, "T", 2, 5),
        **SCAN, "dt_min": 0.0, "dt_max": 1.0,
    },
    "delta_rule": {
        "q": f32(1, "T", 2, 5), "k": f32(1, "T", 2, 5), "v": f32(1, "T", 6, 4), "decay": f32(1, "T", 6),
        "beta": f32(1, "T", 6), "scale": 1.0, "normalise": True,
    },
    "linear_attention": {
        "q": f32(1, "T", 6, 5), "k": f32(1, "T", 6, 5), "v": f32(1, "T", 6, 4), "decay": f32(6), "scale": 1.0,
    },
    "linear_recurrence": {"x": f32(1, "T", 6), "factor": f32(1, "T", 6)},
    "wkv": {"k": f32(1, "T", 6), "v": f32(1, "T", 6), "decay": f32(6), "first": f32(6)},
}  # fmt: skip
STATES = {
    "compress": f32("P", 2, 8, 12),
    "causal_conv": f32("P", 6, 3),
    "selective_scan": f32("P", 6, 5),
    "state_space_scan": f32("P", 6, 4, 5),
    "delta_rule": f32("P", 6, 5, 4),
    "linear_attention": f32("P", 6, 5, 4),
    "linear_recurrence": f32("P", 6),
    "wkv": f32("P", 3, 6),
}
HEADS = f32(1, "T", 6, 4)
RESULTS = {
    "compress": f32(1, "T", 6),
    "causal_conv": f32(1, "T", 6),
    "selective_scan": f32(1, "T", 6),
    "state_space_scan": HEADS,
    "delta_rule": HEADS,
    "linear_attention": HEADS,
    "linear_recurrence": f32(1, "T", 6),
    "wkv": f32(1, "T", 6),
}
each_op = pytest.mark.parametrize("op", TOKENS)


def infer(op: str, args: Args) -> tuple[TensorType, ...]:
    definition = ops.lookup(f"precast.{op}")
    assert definition is not None, op
    return definition.shape_rule(args)


@each_op
def test_both_forms_give_a_row_for_each_token(op: str) -> None:
    assert infer(op, TOKENS[op] | BOUNDS) == (RESULTS[op],)
    assert infer(f"stateful_{op}", TOKENS[op] | METADATA | {"state": STATES[op]}) == (RESULTS[op],)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@each_op
def test_results_are_of_the_tokens_type(op: str, dtype: Dtype) -> None:
    leading = next(name for name in ("q", "x", "v", "kv") if name in TOKENS[op])
    args = TOKENS[op] | BOUNDS | {leading: TensorType(dtype, TOKENS[op][leading].shape)}

    assert infer(op, args) == (TensorType(dtype, RESULTS[op].shape),)


@pytest.mark.parametrize(
    ("op", "change"),
    [
        ("delta_rule", {"decay": None}),
        ("delta_rule", {"decay": f32(1, "T", 6, 5)}),
        ("linear_attention", {"decay": None}),
        ("linear_attention", {"decay": f32(1, "T", 6)}),
        ("linear_attention", {"decay": f32(1, "T", 6, 5)}),
        ("causal_conv", {"bias": None, "activation": "none"}),
        ("state_space_scan", {"d": f32(6), "dt_bias": None, "dt_max": float("inf")}),
    ],
)
def test_optional_arguments(op: str, change: Args) -> None:
    assert infer(op, TOKENS[op] | BOUNDS | change) == (RESULTS[op],)


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        ("compress", {"gate": f32(1, "T", 6)}, "gate: expected shape"),
        ("compress", {"bias": f32(8, 5)}, "kv: expected as many channels as bias, or twice as many"),
        ("compress", {"bias": f32(7, 6)}, "bias: expected blocks of at least 2 tokens, twice, found"),
        ("compress", {"bias": f32(1, 12)}, "bias: expected blocks of at least 2 tokens, found"),
        ("causal_conv", {"x": f32(2, "T", 6)}, r"x's first dimension: expected shape \[1\]"),
        ("causal_conv", {"weight": f32(5, 4)}, r"weight: expected shape \[6, 4\]"),
        ("causal_conv", {"weight": f32(6, 0)}, "weight: expected at least one tap"),
        ("causal_conv", {"weight": f32(6)}, "weight: expected 2 dimensions"),
        ("causal_conv", {"bias": f32(5)}, "bias"),
        ("causal_conv", {"activation": "swish"}, "activation: expected one of none, silu, found 'swish'"),
        ("selective_scan", {"dt": f32(1, "T", 5)}, "dt"),
        ("selective_scan", {"a": f32(6)}, "a: expected 2 dimensions"),
        ("selective_scan", {"c": f32(1, "T", 4)}, "c"),
        ("selective_scan", {"dt_bias": f32(5)}, "dt_bias"),
        ("state_space_scan", {"b": f32(1, "T", 4, 5), "c": f32(1, "T", 4, 5)}, "x: 6 heads are no multiple of 4"),
        ("state_space_scan", {"b": f32(1, "S", 2, 5), "c": f32(1, "S", 2, 5)}, "b"),
        ("state_space_scan", {"a": f32(6, 5)}, "a"),
        ("state_space_scan", {"d": f32(6, 4)}, "d"),
        ("state_space_scan", {"dt_min": 2.0}, "dt_min, dt_max: expected a range, found 2.0..1.0"),
        ("delta_rule", {"k": f32(1, "T", 6, 5)}, "k"),
        ("delta_rule", {"v": f32(1, "T", 5, 4)}, "v: 5 heads are no multiple of 2"),
        ("delta_rule", {"decay": f32(6)}, "decay"),
        ("delta_rule", {"beta": f32(1, "T", 2)}, "beta"),
        ("linear_attention", {"v": f32(1, "T", 3, 4)}, "v's heads"),
        ("linear_attention", {"decay": f32(5)}, "decay"),
        ("linear_attention", {"q": i32(1, "T", 6, 5)}, "q: expected dtype"),
        ("linear_recurrence", {"x": f32(1, "T", 2, 3)}, "x: expected 3 dimensions"),
        ("linear_recurrence", {"factor": f32(6)}, "factor"),
        ("linear_recurrence", {"kind": "min"}, "kind: expected one of sum, max, found 'min'"),
        ("wkv", {"k": f32(1, "T", 5)}, "k"),
        ("wkv", {"decay": f32(1, "T", 6)}, "decay"),
        ("wkv", {"first": f32(5)}, "first"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_refused(op: str, change: Args, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        infer(op, TOKENS[op] | BOUNDS | change)


@each_op
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state": f32("P")}, "state: expected"),
        ({"slots": i32("B", 1)}, "slots: expected 1 dimensions"),
        ({"slots": TensorType("int64", ("B",))}, "slots: expected dtype int32"),
        ({"kv_lens": i32("C")}, "kv_lens: expected shape"),
        ({"cu_seqlens": i32("B")}, "cu_seqlens: expected shape"),
    ],
)
def test_states_and_metadata_that_do_not_fit_are_refused(op: str, change: Args, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        infer(f"stateful_{op}", TOKENS[op] | METADATA | {"state": STATES[op]} | change)


@each_op
def test_states_have_one_type(op: str) -> None:
    state = TensorType("bfloat16", STATES[op].shape)

    with pytest.raises(ShapeError, match="state: expected dtype float32, found bfloat16"):
        infer(f"stateful_{op}", TOKENS[op] | METADATA | {"state": state})
