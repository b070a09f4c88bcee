"""Normalisations: each spelling that models use becomes one op; what is nearly one stays as it is."""

from __future__ import annotations

import pytest
from fx_text import assert_leaves, assert_rewrites

from precast.builder.passes.match.norms import fuse_norm_residual_norm, fuse_residual_norm, match_norms

# --- rms norm ----------------------------------------------------------------------------------------------------

RMS_NORM = """
x: input(float32, 1, T, 8)
w: param(float32, {weight})
squares = aten.pow.Tensor_Scalar(x, {power})
mean = aten.mean.dim(squares, [{dim}], True)
shifted = aten.add.Tensor(mean, 1e-06{alpha})
scale = aten.rsqrt(shifted)
normed = aten.mul.Tensor(x, scale)
y = aten.mul.Tensor({product})
return y
"""
USUAL = {"weight": "8", "power": "2", "dim": "-1", "alpha": "", "product": "w, normed"}
FOUND = """
v0 = precast.rms_norm(x, w, eps=1e-06, cast_before_scale=True)
return v0
"""


@pytest.mark.parametrize("differs", [{}, {"dim": "2"}, {"product": "normed, w"}])
def test_rms_norm(differs: dict[str, str]) -> None:
    assert_rewrites(match_norms, RMS_NORM.format(**{**USUAL, **differs}), FOUND)


@pytest.mark.parametrize(
    "differs",
    [
        pytest.param({"dim": "1"}, id="over the tokens"),
        pytest.param({"dim": "-1, 1"}, id="over two dimensions"),
        pytest.param({"power": "3"}, id="cubes"),
        pytest.param({"alpha": ", alpha=2"}, id="epsilon twice"),
        pytest.param({"product": "w, shifted"}, id="the mean is scaled"),
    ],
)
def test_near_an_rms_norm(differs: dict[str, str]) -> None:
    assert_leaves(match_norms, RMS_NORM.format(**{**USUAL, **differs}))


@pytest.mark.parametrize("weight", ["1, 1, 8", "1"])
def test_a_weight_of_another_shape_stays_beside_the_norm(weight: str) -> None:
    assert_rewrites(
        match_norms,
        RMS_NORM.format(**{**USUAL, "weight": weight}),
        """
        v0 = precast.rms_norm(x, None, eps=1e-06, cast_before_scale=True)
        v1 = aten.mul.Tensor(w, v0)
        return v1
        """,
    )


def test_each_place_that_looks_at_the_elements_must_look_at_the_same() -> None:
    assert_leaves(
        match_norms,
        """
        x: input(float32, 1, T, 8)
        z: input(float32, 1, T, 8)
        squares = aten.pow.Tensor_Scalar(z, 2)
        mean = aten.mean.dim(squares, [-1], True)
        shifted = aten.add.Tensor(mean, 1e-06)
        scale = aten.rsqrt(shifted)
        y = aten.mul.Tensor(x, scale)
        return y
        """,
    )


def test_the_dimension_is_that_of_the_norms_own_mean() -> None:
    """The input is a mean over the last dimension, the norm goes over another one."""
    assert_leaves(
        match_norms,
        """
        h: input(float32, 1, T, 8)
        x = aten.mean.dim(h, [-1], True)
        squares = aten.pow.Tensor_Scalar(x, 2)
        mean = aten.mean.dim(squares, [1], True)
        shifted = aten.add.Tensor(mean, 1e-06)
        scale = aten.rsqrt(shifted)
        y = aten.mul.Tensor(x, scale)
        return y
        """,
    )


def test_squares_may_be_products() -> None:
    assert_rewrites(
        match_norms,
        """
        x: input(float32, 1, T, 8)
        squares = aten.mul.Tensor(x, x)
        mean = aten.mean.dim(squares, [-1], True)
        shifted = aten.add.Tensor(mean, 1e-05)
        scale = aten.rsqrt(shifted)
        y = aten.mul.Tensor(x, scale)
        return y
        """,
        """
        v0 = precast.rms_norm(x, None, eps=1e-05, cast_before_scale=True)
        return v0
        """,
    )


HALF_PRECISION = """
x: input(bfloat16, 1, T, 8)
w: param(bfloat16, 8)
wide = aten.to.dtype(x, float32)
squares = aten.pow.Tensor_Scalar(wide, 2)
mean = aten.mean.dim(squares, [-1], True)
shifted = aten.add.Tensor(mean, 1e-06)
scale = aten.rsqrt(shifted)
normed = aten.mul.Tensor(wide, scale)
"""


def test_half_precision_rounds_before_the_weight() -> None:
    assert_rewrites(
        match_norms,
        HALF_PRECISION
        + """
narrow = aten.to.dtype(normed, bfloat16)
y = aten.mul.Tensor(w, narrow)
return y
""",
        """
        v0 = precast.rms_norm(x, w, eps=1e-06, cast_before_scale=True)
        return v0
        """,
    )


def test_half_precision_rounds_behind_the_weight() -> None:
    assert_rewrites(
        match_norms,
        HALF_PRECISION
        + """
wide_w = aten.to.dtype(w, float32)
scaled = aten.mul.Tensor(normed, wide_w)
y = aten.to.dtype(scaled, bfloat16)
return y
""",
        """
        v0 = precast.rms_norm(x, w, eps=1e-06, cast_before_scale=False)
        return v0
        """,
    )


def test_a_weight_with_an_offset() -> None:
    assert_rewrites(
        match_norms,
        HALF_PRECISION
        + """
wide_w = aten.to.dtype(w, float32)
shifted_w = aten.add.Tensor(wide_w, 1.0)
scaled = aten.mul.Tensor(normed, shifted_w)
y = aten.to.dtype(scaled, bfloat16)
return y
""",
        """
        v0 = precast.rms_norm(x, w, eps=1e-06, offset=1.0, cast_before_scale=False)
        return v0
        """,
    )


def test_a_wider_result_stays() -> None:
    assert_leaves(match_norms, HALF_PRECISION + "return normed")


def test_another_offset_is_part_of_the_weight() -> None:
    """The sum is a weight like any other, made by an op of its own."""
    assert_rewrites(
        match_norms,
        HALF_PRECISION
        + """
narrow = aten.to.dtype(normed, bfloat16)
shifted_w = aten.add.Tensor(w, 2.0)
y = aten.mul.Tensor(narrow, shifted_w)
return y
""",
        """
        v0 = aten.add.Tensor(w, 2.0)
        v1 = precast.rms_norm(x, v0, eps=1e-06, cast_before_scale=True)
        return v1
        """,
    )


# --- layer norm --------------------------------------------------------------------------------------------------


def test_layer_norm_of_torch() -> None:
    assert_rewrites(
        match_norms,
        """
        x: input(float32, 1, T, 8)
        w: param(float32, 8)
        b: param(float32, 8)
        y = aten.layer_norm(x, [8], w, b, 1e-05)
        z = aten.layer_norm(y, [8])
        return z
        """,
        """
        v0 = precast.layer_norm(x, w, b, eps=1e-05)
        v1 = precast.layer_norm(v0, None, None, eps=1e-05)
        return v1
        """,
    )


def test_layer_norm_over_two_dimensions_stays() -> None:
    assert_leaves(
        match_norms,
        """
        x: input(float32, 1, T, 4, 8)
        y = aten.layer_norm(x, [4, 8])
        return y
        """,
    )


LAYER_NORM = """
x: input(float32, 1, T, 8)
w: param(float32, 8)
mean = aten.mean.dim(x, [{outer}], True)
centred = aten.sub.Tensor(x, mean{alpha})
squares = aten.pow.Tensor_Scalar(centred, 2)
variance = aten.mean.dim(squares, [{inner}], True)
shifted = aten.add.Tensor(variance, 1e-05)
scale = aten.rsqrt(shifted)
standard = aten.mul.Tensor(centred, scale)
y = aten.mul.Tensor(standard, w)
return y
"""


def test_layer_norm_written_out() -> None:
    assert_rewrites(
        match_norms,
        LAYER_NORM.format(outer="-1", inner="-1", alpha=""),
        """
        v0 = precast.layer_norm(x, w, None, eps=1e-05)
        return v0
        """,
    )


@pytest.mark.parametrize("differs", [{"outer": "1"}, {"alpha": ", alpha=0.5"}])
def test_an_rms_norm_of_other_differences_is_no_layer_norm(differs: dict[str, str]) -> None:
    usual = {"outer": "-1", "inner": "-1", "alpha": "", **differs}

    assert_rewrites(
        match_norms,
        LAYER_NORM.format(**usual),
        f"""
        v0 = aten.mean.dim(x, [{usual["outer"]}], True)
        v1 = aten.sub.Tensor(x, v0{usual["alpha"]})
        v2 = precast.rms_norm(v1, w, eps=1e-05, cast_before_scale=True)
        return v2
        """,
    )


def test_variance_over_the_tokens_stays() -> None:
    assert_leaves(match_norms, LAYER_NORM.format(outer="1", inner="1", alpha=""))


# --- the residual stream -----------------------------------------------------------------------------------------

RESIDUAL = """
x: input(float32, 1, T, 8)
r: input({dtype}, {shape})
w: param(float32, 8)
total = aten.{sum}.Tensor(x, r{alpha})
normed = precast.rms_norm(total, {weight}, eps=1e-06, cast_before_scale=True)
y = aten.neg(total)
return normed, y
"""
ALIKE = {"dtype": "float32", "shape": "1, T, 8", "sum": "add", "alpha": "", "weight": "w"}


def test_a_sum_and_its_norm_become_one() -> None:
    assert_rewrites(
        fuse_residual_norm,
        RESIDUAL.format(**ALIKE),
        """
        v0 = precast.residual_rms_norm(x, r, w, eps=1e-06, cast_before_scale=True)
        v1 = v0[0]
        v2 = v0[1]
        v3 = aten.neg.default(v2)
        return v1, v3
        """,
    )


@pytest.mark.parametrize(
    "differs",
    [
        pytest.param({"sum": "sub"}, id="a difference"),
        pytest.param({"alpha": ", alpha=2"}, id="the residual twice"),
        pytest.param({"weight": "None"}, id="no weight"),
        pytest.param({"shape": "8"}, id="one vector for all tokens"),
        pytest.param({"dtype": "bfloat16"}, id="another type"),
    ],
)
def test_near_a_residual_norm(differs: dict[str, str]) -> None:
    assert_leaves(fuse_residual_norm, RESIDUAL.format(**{**ALIKE, **differs}))


def test_a_sum_that_is_used_before_its_norm_stays() -> None:
    assert_leaves(
        fuse_residual_norm,
        """
        x: input(float32, 1, T, 8)
        r: input(float32, 1, T, 8)
        w: param(float32, 8)
        total = aten.add.Tensor(x, r)
        early = aten.neg(total)
        normed = precast.rms_norm(total, w, eps=1e-06, cast_before_scale=True)
        y = aten.mul.Tensor(early, normed)
        return y
        """,
    )


def test_a_sum_of_a_number_stays() -> None:
    assert_leaves(
        fuse_residual_norm,
        """
        x: input(float32, 1, T, 8)
        w: param(float32, 8)
        total = aten.add.Tensor(x, 1.0)
        y = precast.rms_norm(total, w, eps=1e-06, cast_before_scale=True)
        return y
        """,
    )


def test_a_chain_of_sums_with_a_norm_that_comes_late() -> None:
    """The second norm's sum is built on the first sum, which is then also the residual of a fused op."""
    assert_rewrites(
        fuse_residual_norm,
        """
        x: input(float32, 1, T, 8)
        r: input(float32, 1, T, 8)
        s: input(float32, 1, T, 8)
        w: param(float32, 8)
        first = aten.add.Tensor(x, r)
        early = aten.neg(first)
        second = aten.add.Tensor(first, s)
        a = precast.rms_norm(second, w, eps=1e-06, cast_before_scale=True)
        b = precast.rms_norm(first, w, eps=1e-06, cast_before_scale=True)
        return early, a, b
        """,
        """
        v0 = aten.add.Tensor(x, r)
        v1 = aten.neg.default(v0)
        v2 = precast.residual_rms_norm(v0, s, w, eps=1e-06, cast_before_scale=True)
        v3 = v2[0]
        v4 = precast.rms_norm(v0, w, eps=1e-06, cast_before_scale=True)
        return v1, v3, v4
        """,
    )


# --- two norms in a row ------------------------------------------------------------------------------------------

TWO_NORMS = """
x: input(float32, 1, T, 8)
r: input(float32, 1, T, 8)
a: param(float32, 8)
w: param(float32, 8)
inner = precast.rms_norm(x, {weight}, eps={eps}, offset=1.0, cast_before_scale={cast})
y, s = precast.residual_rms_norm({sum}, w, eps=1e-06, offset=1.0, cast_before_scale=False)
z = aten.add.Tensor(y, s)
return z{more}
"""
IN_A_ROW = {"weight": "a", "eps": "1e-06", "cast": "False", "sum": "r, inner", "more": ""}


@pytest.mark.parametrize("order", ["r, inner", "inner, r"])
def test_a_norm_before_the_sum_is_taken_in(order: str) -> None:
    assert_rewrites(
        fuse_norm_residual_norm,
        TWO_NORMS.format(**IN_A_ROW | {"sum": order}),
        """
        v0 = precast.norm_residual_norm(x, r, a, w, eps=1e-06, offset=1.0, cast_before_scale=False)
        v1 = v0[0]
        v2 = v0[1]
        v3 = aten.add.Tensor(v1, v2)
        return v3
        """,
    )


@pytest.mark.parametrize(
    "differs",
    [
        pytest.param({"weight": "None"}, id="no weight"),
        pytest.param({"eps": "1e-05"}, id="another eps"),
        pytest.param({"cast": "True"}, id="another rounding"),
        pytest.param({"more": ", inner"}, id="used elsewhere"),
        pytest.param({"sum": "inner, inner"}, id="the norm twice"),
        pytest.param({"sum": "r, x", "more": ", inner"}, id="not in the sum"),
    ],
)
def test_near_two_norms_in_a_row(differs: dict[str, str]) -> None:
    assert_leaves(fuse_norm_residual_norm, TWO_NORMS.format(**IN_A_ROW | differs))
