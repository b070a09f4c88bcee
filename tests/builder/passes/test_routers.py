"""Routers: however the choice of experts is written, it becomes one op; what is another choice stays as it is."""

from __future__ import annotations

import pytest
from fx_text import apply, assert_leaves

from precast.builder.passes.match.routers import match_routers

MODEL = """
x: input({dtype}, T, 8)
y: input({dtype}, T, 8)
gate: param({dtype}, 12, 8)
b: param(float32, {bias})
scales: param(float32, 12)
up: param({dtype}, 12, 10, 8)
down: param({dtype}, 12, 8, 5)
logits = aten.linear(x, gate)
{router}
out = precast.experts(x, ids, weights, up, down, None, None, activation="silu", gated=True)
return out{results}
"""


def model(router: str, *, dtype: str = "float32", bias: str = "12", results: str = "") -> str:
    return MODEL.format(router=router.strip(), dtype=dtype, bias=bias, results=results)


SOFTMAX = """
wide = aten.to.dtype(logits, float32)
scores = aten.softmax.int(wide, -1)
chosen, ids = aten.topk(scores, 3)
total = aten.sum.dim_IntList(chosen, [-1], True)
weights = aten.div.Tensor(chosen, total)
"""
CHOSEN = """
chosen, ids = aten.topk(logits, 3)
weights = aten.softmax.int(chosen, -1)
"""
SIGMOID = """
scores = aten.sigmoid(logits)
ranked = aten.add.Tensor(scores, b)
best, ids = aten.topk(ranked, 3, -1, True, False)
chosen = aten.gather(scores, 1, ids)
total = aten.sum.dim_IntList(chosen, [-1], True)
safe = aten.add.Tensor(total, 1e-20)
shares = aten.div.Tensor(chosen, safe)
weights = aten.mul.Tensor(shares, 2.5)
"""
GROUPS = """
scores = aten.sigmoid(logits)
ranked = aten.add.Tensor(scores, b)
grouped = aten.reshape(ranked, [-1, 4, 3])
best, places = aten.topk(grouped, 2)
sums = aten.sum.dim_IntList(best, [-1])
groups, group_ids = aten.topk(sums, 2, -1, True, False)
zeros = aten.mul.Tensor(sums, 0.0)
marks = aten.scatter.value(zeros, 1, group_ids, 1)
column = aten.unsqueeze(marks, 2)
wide = aten.expand(column, [-1, 4, 3])
flat = aten.reshape(wide, [-1, 12])
kept = aten.to.dtype(flat, bool)
dropped = aten.bitwise_not(kept)
masked = aten.masked_fill.Scalar(ranked, dropped, {masked})
last, ids = aten.topk(masked, 5, -1, True, False)
weights = aten.gather(scores, 1, ids)
"""
ERNIE = """
scores = aten.softmax.int(logits, 1)
line = aten.squeeze.default(b)
ranked = aten.add.Tensor(scores, line)
best, ids = aten.topk(ranked, 2)
chosen = aten.gather(scores, 1, ids)
total = aten.sum.dim_IntList(chosen, [-1], True)
safe = aten.clamp(total, 1e-12)
weights = aten.div.Tensor(chosen, safe)
"""
GEMMA = (
    SOFTMAX.replace("weights =", "shares =")
    + """
column = aten.unsqueeze(scales, 1)
rows = aten.embedding(column, ids)
factors = aten.squeeze.dim(rows, 2)
weights = aten.mul.Tensor(shares, factors)
"""
)


def route_of(text: str) -> str:
    """The call that the pass makes."""
    applied = apply(match_routers, text)
    assert applied.changed, applied.text
    assert "topk" not in applied.text
    return next(line for line in applied.text.splitlines() if "precast.route" in line).partition(" = ")[2]


@pytest.mark.parametrize(
    ("router", "expected"),
    [
        (SOFTMAX, "v0, None, scoring=softmax, top_k=3, normalise=True, dtype=float32"),
        (CHOSEN, "v0, None, scoring=softmax, top_k=3, choice=logits, normalise=False, dtype=float32"),
        (
            SIGMOID,
            "v0, b, scoring=sigmoid, top_k=3, normalise=True, epsilon=1e-20, scale=2.5, dtype=float32",
        ),
        (
            GROUPS.format(masked="-1e30"),
            "v0, b, scoring=sigmoid, top_k=5, num_groups=4, top_groups=2, group_score=top2, normalise=False,"
            " dtype=float32",
        ),
    ],
)
def test_a_choice_becomes_one_op(router: str, expected: str) -> None:
    assert route_of(model(router)) == f"precast.route({expected})"


def test_a_softmax_over_the_chosen_may_be_written_as_sigmoids() -> None:
    router = CHOSEN.replace("aten.softmax.int(chosen, -1)", "aten.sigmoid(chosen)")

    assert "scoring=sigmoid, top_k=3, choice=logits" in route_of(model(router))


def test_the_small_constant_is_the_router_s() -> None:
    assert "epsilon=1e-06" in route_of(model(SIGMOID.replace("1e-20", "1e-06")))


def test_a_bias_in_a_row_of_its_own_and_a_bound() -> None:
    found = apply(match_routers, model(ERNIE, bias="1, 12"))

    assert "v1 = aten.reshape.default(b, [12])" in found.text
    assert "precast.route(v0, v1, scoring=softmax, top_k=2, normalise=True, floor=1e-12, " in found.text


def test_what_is_done_to_the_weights_afterwards_stays() -> None:
    found = apply(match_routers, model(GEMMA))

    assert "precast.route(v0, None, scoring=softmax, top_k=3, normalise=True, dtype=float32)" in found.text
    assert "aten.embedding" in found.text


def test_a_cap_on_the_logits_stays_in_front() -> None:
    found = apply(match_routers, model("capped = aten.tanh(logits)\n" + SOFTMAX.replace("(logits", "(capped")))

    assert "precast.route(v1, None, scoring=softmax" in found.text


def test_logits_may_be_a_sum_of_products() -> None:
    both = "more = aten.linear(y, gate)\nboth = aten.add.Tensor(logits, more)\n"
    found = apply(match_routers, model(both + CHOSEN.replace("(logits", "(both")))

    assert "precast.route(v2, None, scoring=softmax, top_k=3, choice=logits" in found.text


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_that_is_rounded_once(dtype: str) -> None:
    cast = SOFTMAX.replace("weights =", "shares =") + f"\nweights = aten.to.dtype(shares, {dtype})"

    assert route_of(model(cast, dtype=dtype)).endswith(f"normalise=True, dtype={dtype})")


def test_more_experts_than_a_random_row_of_half_precision_has_different_numbers() -> None:
    text = model(CHOSEN, dtype="bfloat16").replace("12, ", "256, ")

    assert "top_k=3, choice=logits, normalise=False, dtype=bfloat16" in route_of(text)


@pytest.mark.parametrize(
    ("router", "old", "new"),
    [
        pytest.param(SOFTMAX, "(wide, -1)", "(wide, 0)", id="a softmax over the tokens"),
        pytest.param(SOFTMAX, "(scores, 3)", "(scores, 3, -1, False)", id="the worst experts"),
        pytest.param(CHOSEN, "aten.softmax.int(chosen, -1)", "aten.tanh(chosen)", id="another scoring"),
        pytest.param(SIGMOID, "gather(scores", "gather(ranked", id="the bias in the weights"),
        pytest.param(SIGMOID, "add.Tensor(scores, b)", "mul.Tensor(scores, b)", id="a bias that multiplies"),
        pytest.param(GROUPS.format(masked="-1e30"), "(grouped, 2)", "(grouped, 3)", id="groups by three experts"),
        pytest.param(GROUPS, "{masked}", "0.0", id="other groups may be chosen from"),
    ],
)
def test_near_routers(router: str, old: str, new: str) -> None:
    assert old in router
    assert_leaves(match_routers, model(router.replace(old, new)))


@pytest.mark.parametrize(
    ("router", "old", "new"),
    [
        pytest.param(SOFTMAX, "(chosen, [-1], True)", "(chosen, [0], True)", id="normalised over the tokens"),
        pytest.param(SOFTMAX, "div.Tensor(chosen, total)", "sub.Tensor(chosen, total)", id="another arithmetic"),
        pytest.param(SIGMOID, "1e-20", "0.01", id="a large constant in the sum"),
        pytest.param(SIGMOID, "add.Tensor(total, 1e-20)", "add.Tensor(total, total)", id="twice the sum"),
        pytest.param(
            SIGMOID,
            "total = aten.sum.dim_IntList(chosen, [-1], True)\nsafe = aten.add.Tensor(total, 1e-20)",
            "more = aten.add.Tensor(chosen, 1e-06)\nsafe = aten.sum.dim_IntList(more, [-1], True)",
            id="the small constant several times",
        ),
    ],
)
def test_what_is_no_part_of_a_router_stays_behind_it(router: str, old: str, new: str) -> None:
    assert old in router
    assert "normalise=False" in route_of(model(router.replace(old, new)))


def test_an_offset_stays_behind_the_router() -> None:
    text = apply(match_routers, model(SIGMOID.replace("mul.Tensor(shares, 2.5)", "add.Tensor(shares, 0.001)"))).text

    assert "epsilon=1e-20, dtype=float32)" in text
    assert "aten.add.Tensor(v2, 0.001)" in text


@pytest.mark.parametrize("is_sorted", [True, False])
def test_the_order_counts_where_the_router_asks_for_one(is_sorted: bool) -> None:
    turned = (
        f"best, turned = aten.topk(logits, 3, -1, True, {is_sorted})\n"
        + """
    chosen = aten.flip(best, [1])
    ids = aten.flip(turned, [1])
    weights = aten.softmax.int(chosen, -1)
    """.replace("    ", "")
    )

    assert_leaves(match_routers, model(turned))


def test_scores_that_are_rounded_before_the_choice_stay() -> None:
    router = SIGMOID.replace("aten.add.Tensor(scores, b)", "aten.mul.Tensor(scores, 1.0)")

    assert_leaves(match_routers, model(router, dtype="bfloat16"))


def test_the_middle_of_a_router_is_not_taken_from_who_reads_it() -> None:
    ordered = SIGMOID.replace(", -1, True, False", "")
    found = apply(match_routers, model(ordered, results=", shares"))

    assert "normalise=True, epsilon=1e-20, dtype=float32)" in found.text
    assert "aten.mul.Tensor(v2, 2.5)" in found.text
    assert_leaves(match_routers, model(SIGMOID.replace("gather(scores", "gather(ranked"), results=", best"))


def test_a_choice_that_depends_on_the_ids_of_tokens_stays() -> None:
    assert_leaves(match_routers, model(CHOSEN.replace("topk(logits", "topk(x")).replace("12,", "8,"))
