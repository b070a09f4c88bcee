"""Products of one input, and the views around them that undo each other."""

from __future__ import annotations

import pytest
from fx_text import apply, assert_leaves, assert_rewrites

from precast.builder.passes.match.params import fuse_projections
from precast.builder.passes.match.spelling import cancel_transposes, join_slices, keep_heads_apart

# --- projections -------------------------------------------------------------------------------------------------

PROJECTIONS = """
x: input(float32, 1, T, 8)
z: input(float32, 1, T, 8)
q: param(float32, {size}, 8)
k: {kind}(float32, 8, 8)
qb: param(float32, {size})
kb: param(float32, 8)
with layer("layers.0"):
    a = aten.linear({first})
with layer("{layer}"):
    b = aten.linear({second})
return a, b{results}
"""
ATTENTION = {"size": "16", "kind": "param", "first": "x, q", "second": "x, k", "layer": "layers.0", "results": ""}


def test_products_of_one_input_become_one() -> None:
    assert_rewrites(
        fuse_projections,
        PROJECTIONS.format(**ATTENTION),
        """
        q_k = concat([read("q", [16, 8], float32), read("k", [8, 8], float32)], dim=0)
        v0 = aten.linear.default(x, q_k, None)
        v1 = aten.slice.Tensor(v0, 2, 0, 16, 1)
        v2 = aten.slice.Tensor(v0, 2, 16, 24, 1)
        return v1, v2
        """,
    )


def test_biases_are_fused_likewise() -> None:
    applied = apply(fuse_projections, PROJECTIONS.format(**{**ATTENTION, "first": "x, q, qb", "second": "x, k, kb"}))

    assert 'qb_kb = concat([read("qb", [16], float32), read("kb", [8], float32)], dim=0)' in applied.text
    assert "v0 = aten.linear.default(x, q_k, qb_kb)" in applied.text


@pytest.mark.parametrize(
    "differs",
    [
        pytest.param({"second": "x, k, kb"}, id="one bias of two"),
        pytest.param({"second": "z, k"}, id="two inputs"),
        pytest.param({"second": "x, q"}, id="one weight twice"),
        pytest.param({"kind": "input"}, id="a weight that is no param"),
        pytest.param({"layer": "layers.1"}, id="two layers"),
        pytest.param({"results": ", k"}, id="a weight that is used elsewhere"),
        pytest.param({"size": "1"}, id="one output"),
        pytest.param({"size": "12"}, id="outputs that are no multiple of 8"),
    ],
)
def test_near_fused_projections(differs: dict[str, str]) -> None:
    assert_leaves(fuse_projections, PROJECTIONS.format(**{**ATTENTION, **differs}))


def test_others_are_fused_beside_an_output_on_its_own() -> None:
    """A gate of one output among them would leave all that comes after it unaligned."""
    assert_rewrites(
        fuse_projections,
        """
        x: input(float32, 1, T, 8)
        q: param(float32, 16, 8)
        gate: param(float32, 1, 8)
        k: param(float32, 8, 8)
        with layer("layers.0"):
            a = aten.linear(x, q)
            g = aten.linear(x, gate)
            b = aten.linear(x, k)
        return a, g, b
        """,
        """
        q_k = concat([read("q", [16, 8], float32), read("k", [8, 8], float32)], dim=0)
        v0 = aten.linear.default(x, q_k, None)
        v1 = aten.slice.Tensor(v0, 2, 0, 16, 1)
        v2 = aten.linear.default(x, gate)
        v3 = aten.slice.Tensor(v0, 2, 16, 24, 1)
        return v1, v2, v3
        """,
    )


def test_products_outside_of_layers_stay() -> None:
    assert_leaves(fuse_projections, PROJECTIONS.format(**ATTENTION).replace("layers.0", "head"))


# --- slices side by side -----------------------------------------------------------------------------------------

SLICES = """
x: input(float32, 1, 3, T, 8)
y: input(float32, 1, 3, T, 8)
a = aten.slice.Tensor(x, 3, {a}, 1)
b = aten.slice.Tensor({of}, {b}, {step})
c = aten.cat({parts}, 3)
d = aten.neg(c)
return d
"""
HALVES = {"a": "0, 4", "b": "3, 4, 8", "of": "x", "step": "1", "parts": "[a, b]"}


@pytest.mark.parametrize(
    ("differs", "expected"),
    [
        pytest.param({}, "v0 = aten.neg.default(x)", id="the whole"),
        pytest.param(
            {"a": "2, 4"}, "v0 = aten.slice.Tensor(x, 3, 2, 8, 1)\nv1 = aten.neg.default(v0)", id="without the first"
        ),
        pytest.param(
            {"b": "3, 4, 7"}, "v0 = aten.slice.Tensor(x, 3, 0, 7, 1)\nv1 = aten.neg.default(v0)", id="without the last"
        ),
        pytest.param(
            {"parts": "[y, a, b]"},
            "v0 = aten.cat.default([y, x], 3)\nv1 = aten.neg.default(v0)",
            id="behind another tensor",
        ),
        pytest.param(
            {"parts": "[b, a, b]"},
            "v0 = aten.slice.Tensor(x, 3, 4, 8, 1)\nv1 = aten.cat.default([v0, x], 3)\nv2 = aten.neg.default(v1)",
            id="behind one that is no neighbour",
        ),
    ],
)
def test_neighbours_are_one_slice(differs: dict[str, str], expected: str) -> None:
    after = f"{expected}\nreturn {expected.splitlines()[-1].partition(' ')[0]}"

    assert_rewrites(join_slices, SLICES.format(**{**HALVES, **differs}), after)


@pytest.mark.parametrize(
    "differs",
    [
        pytest.param({"parts": "[b, a]"}, id="exchanged"),
        pytest.param({"a": "0, 3"}, id="a gap"),
        pytest.param({"a": "0, 5"}, id="an overlap"),
        pytest.param({"of": "y"}, id="of two tensors"),
        pytest.param({"step": "2"}, id="every second"),
        pytest.param({"parts": "[a, y]"}, id="with another tensor"),
    ],
)
def test_near_neighbours(differs: dict[str, str]) -> None:
    assert_leaves(join_slices, SLICES.format(**{**HALVES, **differs}))


def test_slices_of_another_dimension_are_no_neighbours() -> None:
    assert_leaves(
        join_slices,
        """
        x: input(float32, 1, 4, T, 8)
        a = aten.slice.Tensor(x, 1, 0, 2, 1)
        b = aten.slice.Tensor(x, 1, 2, 4, 1)
        c = aten.cat([a, b], 3)
        return c
        """,
    )


# --- transposes --------------------------------------------------------------------------------------------------

TRANSPOSES = """
x: input(float32, 1, 3, T, 8)
w: param(float32, 8)
a = aten.transpose.int(x, 1, 2)
b = {between}
c = aten.transpose.int(b, {dims})
return c
"""


@pytest.mark.parametrize("dims", ["1, 2", "2, 1"])
def test_two_exchanges_are_none(dims: str) -> None:
    text = TRANSPOSES.replace("b = {between}\n", "").replace("(b,", "(a,").format(dims=dims)

    assert_rewrites(
        cancel_transposes, text.replace("return c", "d = aten.neg(c)\nreturn d"), "v0 = aten.neg.default(x)\nreturn v0"
    )


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        ("aten.slice.Tensor(a, 3, 0, 4, 1)", "aten.slice.Tensor(x, 3, 0, 4, 1)"),
        ("aten.slice.Tensor(a, 2, 0, 2, 1)", "aten.slice.Tensor(x, 1, 0, 2, 1)"),
        (
            "precast.rms_norm(a, w, eps=1e-06, cast_before_scale=True)",
            "precast.rms_norm(x, w, eps=1e-06, cast_before_scale=True)",
        ),
    ],
)
def test_also_around_an_op_on_another_dimension(between: str, expected: str) -> None:
    assert_rewrites(cancel_transposes, TRANSPOSES.format(between=between, dims="1, 2"), f"v0 = {expected}\nreturn v0")


@pytest.mark.parametrize(
    ("between", "dims"),
    [
        pytest.param("aten.neg(a)", "2, 3", id="other dimensions"),
        pytest.param("aten.softmax.int(a, 2)", "1, 2", id="around an op on one of them"),
        pytest.param("aten.reshape(a, [1, -1, 8, 3])", "1, 2", id="around a reshape"),
    ],
)
def test_near_cancelled_transposes(between: str, dims: str) -> None:
    assert_leaves(cancel_transposes, TRANSPOSES.format(between=between, dims=dims))


GATED = """
x: input(float32, 1, T, 24)
z: input(float32, 1, T, 8)
a = aten.transpose.int(x, 1, 2)
part = aten.slice.Tensor(a, 1, 8, 16, 1)
gate = aten.silu(part)
b = aten.transpose.int(z, 2, 1)
product = aten.mul.Tensor(b, gate)
c = aten.transpose.int(product, 1, 2)
"""


def test_pointwise_ops_and_slices_pass_an_exchange_on() -> None:
    assert_rewrites(
        cancel_transposes,
        GATED + "return c",
        """
        v0 = aten.slice.Tensor(x, 2, 8, 16, 1)
        v1 = aten.silu.default(v0)
        v2 = aten.mul.Tensor(z, v1)
        return v2
        """,
    )


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(GATED.replace("b = aten.transpose.int(z, 2, 1)", "b = aten.slice.Tensor(z, 1, 0, 8, 1)").replace(
            "z: input(float32, 1, T, 8)", "z: input(float32, 1, 8, T)") + "return c", id="an operand that isn't"),
        pytest.param(GATED + "d = aten.neg(product)\nreturn c, d", id="one that others take, too"),
        pytest.param(GATED.replace("mul.Tensor(b, gate)", "softmax.int(gate, 1)") + "return c", id="along one of them"),
    ],
)  # fmt: skip
def test_exchanges_that_ops_do_not_pass_on(text: str) -> None:
    assert_leaves(cancel_transposes, text)


PRODUCT = """
x: input(float32, 1, T, 8)
w: param(float32, 24, 8)
a = aten.transpose.int(x, 1, 2)
b = aten.matmul.default({factors})
c = aten.transpose.int(b, 1, 2)
return c
"""


def test_a_product_of_exchanged_rows_is_a_linear_layer() -> None:
    assert_rewrites(cancel_transposes, PRODUCT.format(factors="w, a"), "v0 = aten.linear.default(x, w)\nreturn v0")


def test_a_product_of_other_factors_stays() -> None:
    other = PRODUCT.replace("w: param(float32, 24, 8)", "w: input(float32, 1, T, 24)")
    assert_leaves(cancel_transposes, other.format(factors="a, w"))


def test_exchanges_of_other_dimensions_stay() -> None:
    assert_leaves(
        cancel_transposes,
        """
        x: input(float32, 1, 3, T, 8)
        a = aten.transpose.int(x, 1, 2)
        b = aten.transpose.int(a, 2, 3)
        return b
        """,
    )


def test_a_norm_over_an_exchanged_dimension_stays() -> None:
    assert_leaves(
        cancel_transposes,
        """
        x: input(float32, 1, T, 8)
        w: param(float32, 7)
        a = aten.slice.Tensor(x, 1, 0, 7, 1)
        b = aten.transpose.int(a, 1, 2)
        c = precast.rms_norm(b, w, eps=1e-06, cast_before_scale=True)
        d = aten.transpose.int(c, 1, 2)
        return d
        """,
    )


# --- heads as rows -----------------------------------------------------------------------------------------------

GATED_NORM = """
x: input(float32, 1, T, 3, 8)
z: input(float32, 1, T, 3, 8)
y: input(float32, 3, 1, T, 8)
w: param(float32, 8)
heads = aten.reshape(x, [{rows}])
gates = aten.reshape({other}, [{rows}])
normed = precast.rms_norm(heads, w, eps=1e-06, cast_before_scale=True)
gate = aten.silu(gates)
product = aten.mul.Tensor(normed, {factor})
back = aten.reshape(product, [{back}])
c = aten.neg(back)
return c
"""
ROWS = {"rows": "-1, 8", "other": "z", "factor": "gate", "back": "1, -1, 3, 8"}


def test_heads_stay_apart() -> None:
    assert_rewrites(
        keep_heads_apart,
        GATED_NORM.format(**ROWS),
        """
        v0 = precast.rms_norm(x, w, eps=1e-06, cast_before_scale=True)
        v1 = aten.silu.default(z)
        v2 = aten.mul.Tensor(v0, v1)
        v3 = aten.neg.default(v2)
        return v3
        """,
    )


def test_a_vector_for_all_rows_is_no_row() -> None:
    applied = apply(keep_heads_apart, GATED_NORM.format(**{**ROWS, "factor": "w"}))

    assert "v1 = aten.mul.Tensor(v0, w)" in applied.text
    assert "reshape" not in applied.text


def test_heads_that_go_on_as_rows_are_merged_after_all() -> None:
    applied = apply(keep_heads_apart, GATED_NORM.format(**{**ROWS, "back": "-1, 24"}))

    assert "v3 = aten.reshape.default(v2, [-1, 8])" in applied.text


def test_rows_in_two_orders_are_not_multiplied_as_they_lie() -> None:
    applied = apply(keep_heads_apart, GATED_NORM.format(**{**ROWS, "other": "y"}))

    assert "v1 = aten.reshape.default(v0, [-1, 8])" in applied.text


@pytest.mark.parametrize("rows", ["1, -1, 8", "-1, 24", "-1, 4"], ids=["not one dimension", "longer", "shorter"])
def test_near_heads_as_rows(rows: str) -> None:
    assert_leaves(
        keep_heads_apart,
        f"""
        x: input(float32, 1, T, 3, 8)
        rows = aten.reshape(x, [{rows}])
        a = aten.silu(rows)
        b = aten.reshape(a, [1, -1, 3, 8])
        return b
        """,
    )


def test_tokens_that_are_merged_with_nothing_stay() -> None:
    """It is no copy, and the next op wants the dimensions that it has."""
    assert_leaves(
        keep_heads_apart,
        """
        x: input(float32, 1, T, 8)
        rows = aten.reshape(x, [-1, 8])
        a = aten.silu(rows)
        b = aten.reshape(a, [1, -1, 8])
        c = aten.neg(b)
        return c
        """,
    )
