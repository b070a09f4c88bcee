"""Attention that a model writes out: the spellings that are found, and what only looks like attention of ours."""

from __future__ import annotations

import pytest
import torch
from fx_text import _random_inputs, apply, assert_leaves, assert_rewrites, compute, read_graph, write_graph
from torch._dispatch.python import enable_python_dispatcher

from precast.builder import pipeline
from precast.builder.capture.routing import routed_attention
from precast.builder.passes.match.attention import match_attention

INPUTS = """
input_ids: input(int64, 1, T)
positions: input(int64, 1, T)
cu_seqlens: input(int32, B1)
q: input({dtype}, 1, 4, T, 6)
k: input({dtype}, 1, {kv}, T, 6)
v: input({dtype}, 1, {kv}, T, 5)
n = aten.sym_size.int(input_ids, 1)
t = aten.transpose.int(k, 2, 3)
"""
MASK = "mask = precast_trace.causal_mask(cu_seqlens, n, window={window}, chunk=None, dtype={dtype})\n"
BODY = """
scores = aten.matmul(q, t)
scaled = aten.mul.Tensor(scores, 0.25)
logits = aten.add.Tensor(scaled, mask)
p = aten.softmax.int(logits, -1)
out = aten.matmul(p, v)
return out
"""
AFTER = """
v0 = aten.transpose.int(k, 2, 3)
v1 = aten.transpose.int(q, 1, 2)
v2 = aten.transpose.int(v0, 2, 3)
v3 = aten.transpose.int(v2, 1, 2)
v4 = aten.transpose.int(v, 1, 2)
v5 = precast.attention(v1, v3, v4, None, cu_seqlens, scale={scale}, window={window}, soft_cap=None{slopes})
v6 = aten.transpose.int(v5, 1, 2)
return v6
"""


@pytest.fixture(autouse=True)
def _trace_ops() -> None:
    with routed_attention():  # defines the op that makes masks in traces
        pass


def graph(
    body: str = BODY,
    *edits: tuple[str, str],
    window: int | None = None,
    dtype: str = "float32",
    kv: int = 4,
    mask: str = MASK,
) -> str:
    for old, new in edits:
        assert body.count(old) == 1, old
        body = body.replace(old, new)
    return INPUTS.format(dtype=dtype, kv=kv) + mask.format(window=window, dtype=dtype) + body


def after(scale: float, window: int | None = None, slopes: str = "") -> str:
    return AFTER.format(scale=scale, window=window, slopes=slopes and f", slopes={slopes}")


# --- what is found -----------------------------------------------------------------------------------------------

SCALED = "scaled = aten.mul.Tensor(scores, 0.25)\nlogits = aten.add.Tensor(scaled, mask)"


@pytest.mark.parametrize(
    ("edits", "scale"),
    [
        pytest.param((), 0.25, id="scaled, then masked"),
        pytest.param(
            ((SCALED, "added = aten.add.Tensor(scores, mask)\nlogits = aten.mul.Tensor(added, 0.25)"),),
            0.25,
            id="masked, then scaled",
        ),
        pytest.param((("(scores, 0.25)", "(scores, 0.408248290463863)"),), 6**-0.5, id="by the size of a head"),
        pytest.param((("mul.Tensor(scores, 0.25)", "div.Tensor(scores, 2.449489742783178)"),), 6**-0.5, id="divided"),
        pytest.param(((SCALED, "logits = aten.add.Tensor(scores, mask)"),), 1.0, id="not scaled"),
        pytest.param(
            (("out = ", "d = aten.dropout(p, 0.0, False)\nout = "), ("matmul(p, v)", "matmul(d, v)")),
            0.25,
            id="dropout that drops nothing",
        ),
        pytest.param(
            (("softmax.int(logits, -1)", "softmax.int(logits, 3)"),), 0.25, id="dimension counted from the front"
        ),
        pytest.param((("softmax.int(logits, -1)", "_softmax(logits, -1, False)"),), 0.25, id="the other softmax"),
        pytest.param(
            (
                ("add.Tensor(scaled, mask)", "where.self(seen, scaled, low)"),
                ("scaled = ", "seen = aten.eq.Scalar(mask, 0.0)\nlow = aten.full_like(mask, -1e30)\nscaled = "),
            ),
            0.25,
            id="chosen by the mask",
        ),
    ],
)
def test_scales_and_masks_in_any_order(edits: tuple[tuple[str, str], ...], scale: float) -> None:
    assert_rewrites(match_attention, graph(BODY, *edits), after(scale))


@pytest.mark.parametrize("window", [1, 2, 5, 40, 60])
def test_a_window_is_found(window: int) -> None:
    assert_rewrites(match_attention, graph(window=window), after(0.25, window))


def test_heads_that_share_keys() -> None:
    assert_rewrites(match_attention, graph(kv=1), after(0.25))


def test_half_precision_widened_for_the_scores() -> None:
    body = """
    wide = aten.to.dtype(q, float32)
    tall = aten.to.dtype(t, float32)
    scores = aten.matmul(wide, tall)
    scaled = aten.mul.Tensor(scores, 0.25)
    far = aten.to.dtype(mask, float32)
    logits = aten.add.Tensor(scaled, far)
    p = aten.softmax.int(logits, -1)
    low = aten.to.dtype(p, bfloat16)
    out = aten.matmul(low, v)
    return out
    """.replace("    ", "")
    found = apply(match_attention, graph(body, dtype="bfloat16"))

    assert found.text == after(0.25).strip()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scores_in_half_precision(dtype: str) -> None:
    edits = (("(scores, 0.25)", "(scores, 0.408248290463863)"),)

    assert_rewrites(match_attention, graph(BODY, *edits, dtype=dtype), after(6**-0.5))


# --- biases by distance ------------------------------------------------------------------------------------------

ALIBI = """
steep: constant(float32, [[[0.5]], [[0.25]], [[0.125]], [[0.0625]]])
row = aten.to.dtype({at}, float32)
bias = aten.mul.Tensor(row, steep)
"""
BIASED = (
    "scaled = aten.mul.Tensor(scores, 0.25)\nscored = aten.add.Tensor(scaled, bias)\n"
    "logits = aten.add.Tensor(scored, mask)"
)
DISTANCES = """
col = aten.unsqueeze(positions, 2)
far = aten.sub.Tensor(positions, col)
"""


def alibi(at: str, before: str = "") -> tuple[tuple[str, str], ...]:
    return ((SCALED, BIASED), ("scores = ", before + ALIBI.format(at=at) + "scores = "))


@pytest.mark.parametrize(
    "edits",
    [
        pytest.param(alibi("positions"), id="that grow with the key's place"),
        pytest.param(alibi("far", DISTANCES), id="that grow with the distance"),
        pytest.param(alibi("at", "at = aten.arange.default(n)\n"), id="that grow with the key's place in the batch"),
    ],
)
def test_slopes_are_found(edits: tuple[tuple[str, str], ...]) -> None:
    found = assert_rewrites(match_attention, graph(BODY, *edits), after(0.25, slopes="alibi_slopes_1"))

    (slopes,) = found.ctx.constants.values()
    torch.testing.assert_close(slopes.value, torch.tensor([0.5, 0.25, 0.125, 0.0625]))
    assert slopes.value.dtype == torch.float32


def test_slopes_in_half_precision_are_those_of_float32() -> None:
    exact = ALIBI.replace("0.0625", "0.07").format(at="positions")
    narrow = exact.replace("bias = aten.mul.Tensor(row, steep)", "far = aten.mul.Tensor(row, steep)")
    narrow += "bias = aten.to.dtype(far, bfloat16)\n"

    found = apply(match_attention, graph(BODY, (SCALED, BIASED), ("scores = ", narrow + "scores = "), dtype="bfloat16"))

    assert found.text == after(0.25, slopes="alibi_slopes_1").strip()
    (slopes,) = found.ctx.constants.values()
    torch.testing.assert_close(slopes.value, torch.tensor([0.5, 0.25, 0.125, 0.07]))


def test_slopes_that_are_scaled_with_the_scores() -> None:
    edits = (
        (SCALED, "scored = aten.add.Tensor(scores, bias)\nscaled = aten.mul.Tensor(scored, 0.5)\n"
                 "logits = aten.add.Tensor(scaled, mask)"),
        ("scores = ", ALIBI.format(at="positions") + "scores = "),
    )  # fmt: skip

    found = assert_rewrites(match_attention, graph(BODY, *edits), after(0.5, slopes="alibi_slopes_1"))

    (slopes,) = found.ctx.constants.values()
    torch.testing.assert_close(slopes.value, torch.tensor([0.25, 0.125, 0.0625, 0.03125]))


def test_layers_of_equal_slopes_share_them() -> None:
    second = BODY.replace("return out", "").replace("scores", "scores2").replace("scaled", "scaled2")
    second = (
        second.replace("logits", "logits2")
        .replace("p = ", "p2 = ")
        .replace("(p, v)", "(p2, v)")
        .replace("out =", "out2 =")
    )
    both = BODY.replace("return out", second + "return out, out2")
    both = both.replace("(scaled, mask)", "(scored, mask)").replace("(scaled2, mask)", "(scored2, mask)")
    both = both.replace("logits =", "scored = aten.add.Tensor(scaled, bias)\nlogits =")
    both = both.replace("logits2 =", "scored2 = aten.add.Tensor(scaled2, bias)\nlogits2 =")
    both = ALIBI.format(at="positions") + both

    found = apply(match_attention, graph(both))

    assert found.text.count("precast.attention") == 2
    assert found.text.count("slopes=alibi_slopes_1") == 2
    assert len(found.ctx.constants) == 1


SUM_AND_PRODUCT = """
q3 = aten.reshape(q, [4, -1, 6])
t3 = aten.reshape(t, [4, 6, -1])
v3 = aten.reshape(v, [4, -1, 5])
steep: constant(float32, [[[0.5]], [[0.25]], [[0.125]], [[0.0625]]])
row = aten.to.dtype(positions, float32)
bias = aten.mul.Tensor(row, steep)
scores = aten.baddbmm(bias, q3, t3, beta={beta}, alpha=0.25)
four = aten.view(scores, [1, 4, n, n])
logits = aten.add.Tensor(four, mask)
p = aten.softmax.int(logits, -1)
p3 = aten.view(p, [4, n, n])
out = aten.bmm(p3, v3)
return out
"""


@pytest.mark.parametrize(("beta", "steepest"), [(1.0, 0.5), (2.0, 1.0)])
def test_a_product_that_is_added_to_the_bias(beta: float, steepest: float) -> None:
    with enable_python_dispatcher():  # the op's fake needs it
        found = apply(match_attention, graph(SUM_AND_PRODUCT.format(beta=beta)))

    assert "scale=0.25, window=None, soft_cap=None, slopes=alibi_slopes_1" in found.text
    assert "softmax" not in found.text
    (slopes,) = found.ctx.constants.values()
    torch.testing.assert_close(slopes.value, steepest * torch.tensor([1, 0.5, 0.25, 0.125]))


# --- masks that are tables of the model --------------------------------------------------------------------------

TABLE = """
table: constant(bool, {rows})
low: constant(float32, -3e38)
"""
BY_TABLE = """
some = aten.slice.Tensor(table, 0, 0, n)
seen = aten.slice.Tensor(some, 1, 0, n)
scores = aten.matmul(q, t)
scaled = aten.mul.Tensor(scores, 0.25)
logits = aten.where.self(seen, scaled, low)
p = aten.softmax.int(logits, -1)
out = aten.matmul(p, v)
return out
"""


def by_table(rows: torch.Tensor) -> str:
    return graph(BY_TABLE, mask=TABLE.replace("{rows}", str(rows.tolist())))


def causal(size: int, window: int | None = None) -> torch.Tensor:
    seen = torch.ones(size, size, dtype=torch.bool).tril()
    return seen if window is None else seen.triu(1 - window)


@pytest.mark.parametrize("window", [None, 3, 55])
def test_a_table_of_the_model_is_a_mask(window: int | None) -> None:
    """55: a window that shows beyond the tokens for which other masks are compared."""
    source = read_graph(by_table(causal(64, window)))
    inputs = _random_inputs(source) | {"cu_seqlens": torch.tensor([0, 7, 7], dtype=torch.int32)}
    (expected,) = compute(source, inputs)

    pipeline.run(source.graph, source.ctx, (match_attention,))

    assert write_graph(source.graph, source.ctx) == after(0.25, window).strip()
    torch.testing.assert_close(compute(source, inputs)[0], expected, rtol=1e-5, atol=1e-5)


# --- what is not found -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(torch.ones(64, 64, dtype=torch.bool), id="all see all"),
        pytest.param(causal(64).T.contiguous(), id="the later tokens"),
        pytest.param(causal(64) | (torch.arange(64) < 4), id="the first tokens too"),
        pytest.param(
            causal(64) & (torch.arange(64) % 2 == 0).logical_or(torch.eye(64, dtype=torch.bool)), id="every other"
        ),
        pytest.param(causal(64, 5) | (causal(64) & (torch.arange(64) < 2)), id="a window and the first tokens"),
        pytest.param(causal(64) & (torch.arange(64)[:, None] // 8 == torch.arange(64) // 8), id="chunks"),
    ],
)
def test_other_tables_stay(rows: torch.Tensor) -> None:
    assert_leaves(match_attention, by_table(rows))


QUADRATIC = "squares = aten.mul.Tensor(far, far)\nabsolute = aten.neg(squares)\n"


@pytest.mark.parametrize(
    "edits",
    [
        pytest.param(((SCALED, "logits = aten.mul.Tensor(scores, 0.25)"),), id="not causal"),
        pytest.param(
            (("(scaled, mask)", "(scaled, none)"), ("scaled = ", "none = aten.mul.Tensor(mask, 0.0)\nscaled = ")),
            id="a mask that masks nothing",
        ),
        pytest.param((("softmax.int(logits, -1)", "softmax.int(logits, 2)"),), id="over queries"),
        pytest.param(
            (
                (
                    SCALED,
                    "small = aten.div.Tensor(scores, 3.0)\ncap = aten.tanh(small)\nscaled = aten.mul.Tensor(cap, 3.0)\n"
                    "logits = aten.add.Tensor(scaled, mask)",
                ),
            ),
            id="a soft cap",
        ),
        pytest.param(alibi("absolute", DISTANCES + QUADRATIC), id="a bias by the square of the distance"),
        pytest.param(
            ((SCALED, BIASED), ("scores = ", "bias: param(float32, 4, 1, 1)\nscores = ")), id="a bias of the checkpoint"
        ),
        pytest.param(
            (("(scores, 0.25)", "(scores, steep)"), ("scores = ", "steep: param(float32, 4, 1, 1)\nscores = ")),
            id="a scale of the checkpoint",
        ),
        pytest.param(
            (
                ("(scores, 0.25)", "(scores, steep)"),
                ("scores = ", "steep: constant(float32, [[[0.5]], [[0.25]], [[0.5]], [[0.5]]])\nscores = "),
            ),
            id="a scale for each head",
        ),
        pytest.param(
            (
                ("(scores, 0.25)", "(scores, late)"),
                ("scores = ", "col = aten.unsqueeze(positions, 2)\nlate = aten.div.Tensor(col, 9.0)\nscores = "),
            ),
            id="a scale by position",
        ),
        pytest.param((("return out", "return out, p"),), id="probabilities that are looked at"),
        pytest.param(
            (("out = ", "half = aten.mul.Tensor(p, 0.5)\nout = "), ("matmul(p, v)", "matmul(half, v)")),
            id="half of the probabilities",
        ),
        pytest.param(
            (
                (
                    "out = aten.matmul(p, v)",
                    "s = aten.transpose.int(v, 2, 3)\nout = aten.matmul(s, p)",
                ),
            ),
            id="a product over queries",
        ),
        pytest.param(
            (
                (
                    "scores = aten.matmul(q, t)",
                    "first = aten.matmul(q, t)\nu = aten.neg(q)\nh = aten.mul.Tensor(u, 0.5)\n"
                    "second = aten.matmul(h, t)\nscores = aten.add.Tensor(first, second)",
                ),
            ),
            id="two products",
        ),
        pytest.param(
            (
                ("out = ", "flat = aten.reshape(p, [1, -1, n])\none = aten.select.int(v, 1, 0)\nout = "),
                ("matmul(p, v)", "matmul(flat, one)"),
            ),
            id="values that all heads share, in a row",
        ),
    ],
)
def test_near_attention(edits: tuple[tuple[str, str], ...]) -> None:
    assert_leaves(match_attention, graph(BODY, *edits))


def test_a_mask_that_was_refused_is_no_mask() -> None:
    assert_leaves(match_attention, graph(window=-1))
