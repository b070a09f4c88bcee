"""Activation functions, gates and embeddings."""

from __future__ import annotations

import pytest
from fx_text import apply, assert_leaves, assert_rewrites

from precast.builder.passes.match.pointwise import fuse_gated_activation, match_activations, match_embedding

# --- activations -------------------------------------------------------------------------------------------------

TANH_GELU = """
x: input({dtype}, 1, T, 8)
cube = aten.pow.Tensor_Scalar(x, {power})
small = aten.mul.Tensor(cube, {small})
sum = aten.add.Tensor({sum})
inner = aten.mul.Tensor(sum, {root})
t = aten.tanh(inner)
one = aten.add.Tensor(t, 1.0)
half = aten.mul.Tensor(x, 0.5)
y = aten.mul.Tensor({product})
return y
"""
GPT2 = {
    "dtype": "float32", "power": "3.0", "small": "0.044715", "sum": "x, small", "root": "0.7978845608028654",
    "product": "half, one",
}  # fmt: skip


@pytest.mark.parametrize("differs", [{}, {"sum": "small, x"}, {"product": "one, half"}, {"dtype": "bfloat16"}])
def test_gelu_by_tanh(differs: dict[str, str]) -> None:
    assert_rewrites(
        match_activations,
        TANH_GELU.format(**{**GPT2, **differs}),
        """
        v0 = aten.gelu.default(x, approximate=tanh)
        return v0
        """,
    )


@pytest.mark.parametrize(
    "differs",
    [
        pytest.param({"small": "0.0447"}, id="another factor"),
        pytest.param({"root": "0.79788456"}, id="a root of other digits"),
        pytest.param({"power": "2.0"}, id="a square"),
        pytest.param({"sum": "x, cube"}, id="the cube itself"),
        pytest.param({"product": "x, one"}, id="not halved"),
    ],
)
def test_near_a_gelu(differs: dict[str, str]) -> None:
    assert_leaves(match_activations, TANH_GELU.format(**{**GPT2, **differs}))


# --- gates -------------------------------------------------------------------------------------------------------

GATED = """
x: input(float32, 1, T, 8)
z: input(float32, 1, T, 8)
g: param(float32, {width}, 8)
u: {kind}(float32, 6, 8)
b: param(float32, 6)
c: param(float32, 6)
gate = aten.linear({gate})
up = aten.linear({up})
activated = aten.{activation}
y = aten.mul.Tensor({product})
return {results}
"""
MLP = {
    "width": "6", "kind": "param", "gate": "x, g", "up": "x, u", "activation": "silu(gate)",
    "product": "activated, up", "results": "y",
}  # fmt: skip


@pytest.mark.parametrize(
    ("activation", "kind"),
    [("silu(gate)", "silu"), ("gelu(gate)", "gelu"), ("gelu(gate, approximate='tanh')", "gelu_tanh")],
)
@pytest.mark.parametrize("product", ["activated, up", "up, activated"])
def test_gate_and_up_become_one_product(activation: str, kind: str, product: str) -> None:
    assert_rewrites(
        fuse_gated_activation,
        GATED.format(**{**MLP, "activation": activation, "product": product}),
        f"""
        g_u = concat([read("g", [6, 8], float32), read("u", [6, 8], float32)], dim=0)
        v0 = aten.linear.default(x, g_u, None)
        v1 = precast.gated_activation(v0, kind={kind})
        return v1
        """,
    )


def test_biases_are_fused_likewise() -> None:
    applied = apply(fuse_gated_activation, GATED.format(**{**MLP, "gate": "x, g, b", "up": "x, u, c"}))

    assert 'b_c = concat([read("b", [6], float32), read("c", [6], float32)], dim=0)' in applied.text
    assert "v0 = aten.linear.default(x, g_u, b_c)" in applied.text


@pytest.mark.parametrize(
    "differs",
    [
        pytest.param({"width": "1"}, id="unequal widths"),
        pytest.param({"up": "z, u"}, id="two inputs"),
        pytest.param({"up": "x, u, c"}, id="one bias of two"),
        pytest.param({"up": "x, g"}, id="one weight twice"),
        pytest.param({"kind": "input"}, id="a weight that is no param"),
        pytest.param({"activation": "sigmoid(gate)"}, id="an activation that is no gate's"),
        pytest.param({"product": "activated, activated"}, id="nothing beside the gate"),
        pytest.param({"results": "y, gate"}, id="the gate is used elsewhere"),
        pytest.param({"gate": "x, g, b", "up": "x, u, b"}, id="one bias twice"),
    ],
)
def test_near_a_gate(differs: dict[str, str]) -> None:
    assert_leaves(fuse_gated_activation, GATED.format(**{**MLP, **differs}))


HALVES = """
x: input(float32, {shape})
gate = aten.slice.Tensor(x, {dim}, {start}, {middle}, 1)
up = aten.slice.Tensor({up}, {up_dim}, {middle}, {end}, 1)
activated = aten.silu(gate)
y = aten.mul.Tensor(up, activated)
return y
"""
FUSED = {
    "shape": "1, T, 8", "dim": "2", "up_dim": "2", "start": "0", "middle": "4", "end": "8", "up": "x",
}  # fmt: skip


def test_halves_of_one_product() -> None:
    assert_rewrites(
        fuse_gated_activation,
        HALVES.format(**FUSED),
        """
        v0 = precast.gated_activation(x, kind=silu)
        return v0
        """,
    )


@pytest.mark.parametrize(
    "differs",
    [
        pytest.param({"end": "7", "middle": "4", "start": "1"}, id="not from the start"),
        pytest.param({"shape": "1, T, 9"}, id="not to the end"),
        pytest.param({"shape": "1, 8, 8", "dim": "1", "up_dim": "1"}, id="of another dimension"),
        pytest.param({"shape": "1, T, 3", "middle": "1", "end": "3"}, id="one element and two"),
        pytest.param({"shape": "1, 2, 2", "middle": "1", "end": "2", "up_dim": "1"}, id="of two dimensions"),
    ],
)
def test_near_two_halves(differs: dict[str, str]) -> None:
    assert_leaves(fuse_gated_activation, HALVES.format(**{**FUSED, **differs}))


def test_the_halves_in_the_other_order_stay() -> None:
    assert_leaves(
        fuse_gated_activation,
        """
        x: input(float32, 1, T, 8)
        up = aten.slice.Tensor(x, 2, 0, 4, 1)
        gate = aten.slice.Tensor(x, 2, 4, 8, 1)
        activated = aten.silu(gate)
        y = aten.mul.Tensor(activated, up)
        return y
        """,
    )


# --- embeddings --------------------------------------------------------------------------------------------------


def test_a_lookup() -> None:
    assert_rewrites(
        match_embedding,
        """
        ids: input(int64, 1, T)
        w: param(float32, 9, 8)
        y = aten.embedding(w, ids, 0)
        return y
        """,
        """
        v0 = precast.embedding(ids, w, scale=1.0)
        return v0
        """,
    )


SCALED = """
ids: input(int64, 1, T)
w: param({dtype}, 9, 8)
scale: {scale}
{rounded}
rows = aten.embedding(w, ids)
y = aten.mul.Tensor(rows, {factor})
return y
"""
CONSTANT = {"dtype": "float32", "scale": "constant(float32, 6.9282)", "rounded": "", "factor": "scale"}


@pytest.mark.parametrize(
    ("differs", "scale"),
    [
        pytest.param({}, "6.928199768066406", id="a constant"),
        pytest.param({"factor": "12.0"}, "12.0", id="a number"),
        pytest.param({"dtype": "bfloat16", "factor": "12.0"}, "12.0", id="a number that bfloat16 has"),
        pytest.param(
            {"dtype": "bfloat16", "rounded": "scale = aten.to.dtype(scale, bfloat16)"},
            "6.9375",
            id="a rounded constant",
        ),
        pytest.param(
            {"dtype": "bfloat16", "scale": "constant(float32, 8.0)"}, "8.0", id="a constant that bfloat16 has"
        ),
    ],
)
def test_a_scale_is_taken_in(differs: dict[str, str], scale: str) -> None:
    assert_rewrites(
        match_embedding,
        SCALED.format(**{**CONSTANT, **differs}),
        f"""
        v0 = precast.embedding(ids, w, scale={scale})
        return v0
        """,
    )


@pytest.mark.parametrize(
    "differs",
    [
        pytest.param({"dtype": "bfloat16", "factor": "1.7"}, id="a number that bfloat16 would round"),
        pytest.param({"dtype": "bfloat16"}, id="a constant that bfloat16 would round"),
        pytest.param(
            {"scale": "constant(float32, [2.0])", "dtype": "bfloat16"}, id="a constant that widens the result"
        ),
        pytest.param({"scale": "constant(float32, [2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0])"}, id="a vector"),
        pytest.param({"scale": "param(float32)"}, id="a param"),
    ],
)
def test_another_scale_stays_a_product(differs: dict[str, str]) -> None:
    text = apply(match_embedding, SCALED.format(**{**CONSTANT, **differs})).text

    assert "v0 = precast.embedding(ids, w, scale=1.0)" in text
    assert "aten.mul.Tensor(v0, " in text
