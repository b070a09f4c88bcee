"""What is done to params becomes a part of their recipes."""

from __future__ import annotations

import pytest
from fx_text import apply, assert_leaves, assert_rewrites

from precast.builder.passes.match.params import fold_param_views
from precast.ir.weights import recipes


@pytest.mark.parametrize(
    ("call", "recipe"),
    [
        ("aten.transpose.int(p, 2, 0)", "p.transposed_0_2 = transpose(READ, 0, 2)"),
        ("aten.transpose.int(p, -1, 1)", "p.transposed_1_2 = transpose(READ, 1, 2)"),
        ("aten.reshape(p, [6, -1])", "p.reshaped_6_24 = reshape(READ, [6, 24])"),
        ("aten.unsqueeze(p, 0)", "p.reshaped_1_6_4_6 = reshape(READ, [1, 6, 4, 6])"),
        ("aten.slice.Tensor(p, 1, 1, 3, 1)", "p.sliced_1_1_2 = slice(READ, dim=1, start=1, length=2)"),
        ("aten.select.int(p, 0, -1)", "p.selected_0_5 = reshape(slice(READ, dim=0, start=5, length=1), [4, 6])"),
        ("aten.to.dtype(p, bfloat16)", "p.bfloat16 = cast(READ, bfloat16)"),
        (
            "aten.permute(p, [2, 0, 1])",
            "p.permuted_2_0_1 = transpose(transpose(READ, 0, 2), 1, 2)",
        ),
    ],
)
def test_one_step(call: str, recipe: str) -> None:
    applied = apply(fold_param_views, f"p: param(float32, 6, 4, 6)\nq = {call}\nz = aten.neg(q)\nreturn z\n")

    first, *rest = applied.text.splitlines()
    assert first == recipe.replace("READ", 'read("p", [6, 4, 6], float32)')
    assert rest == [f"v0 = aten.neg.default({first.partition(' = ')[0]})", "return v0"]


def test_steps_one_behind_the_other() -> None:
    applied = apply(
        fold_param_views,
        """
        p: param(float32, 3, 8, 6)
        halves = aten.reshape(p, [3, 4, 2, 6])
        turned = aten.transpose.int(halves, 1, 2)
        w = aten.reshape(turned, [3, 8, 6])
        z = aten.neg(w)
        return z
        """,
    )
    (info,) = applied.ctx.params.values()

    assert recipes.shape(info.recipe) == (3, 8, 6)
    assert applied.text.splitlines()[1:] == [f"v0 = aten.neg.default({info.name})", "return v0"]


def test_params_that_are_joined_are_one() -> None:
    assert_rewrites(
        fold_param_views,
        """
        a: param(float32, 12, 6)
        b: param(float32, 12, 6)
        rows = aten.reshape(a, [3, 4, 6])
        more = aten.reshape(b, [3, 4, 6])
        w = aten.cat([rows, more], -2)
        z = aten.neg(w)
        return z
        """,
        """
        a_b.reshaped_3_4_6.joined_1 = concat([reshape(read("a", [12, 6], float32), [3, 4, 6]), reshape(read("b", [12, 6], float32), [3, 4, 6])], dim=1)
        v0 = aten.neg.default(a_b.reshaped_3_4_6.joined_1)
        return v0
        """,  # noqa: E501
    )


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("y = aten.cat([p, x])", id="with another value"),
        pytest.param("w = aten.cat([p, p, q])\ny = aten.add.Tensor(w, 1.0)", id="of two dtypes"),
        pytest.param("w = aten.cat([large, large])\nv = aten.neg(large)\ny = aten.neg(w)\nreturn y, v", id="used"),
    ],
)
def test_what_is_joined_stays(body: str) -> None:
    assert_leaves(
        fold_param_views,
        "p: param(float32, 4, 6)\nq: param(bfloat16, 4, 6)\nlarge: param(float32, 1025, 1024)\n"
        f"x: input(float32, T, 6)\n{body}\n" + ("" if "return" in body else "return y\n"),
    )


def test_one_param_for_equal_steps() -> None:
    assert_rewrites(
        fold_param_views,
        """
        p: param(float32, 4, 6)
        a = aten.transpose.int(p, 0, 1)
        b = aten.transpose.int(p, 1, 0)
        z = aten.mul.Tensor(a, b)
        return z
        """,
        """
        p.transposed_0_1 = transpose(read("p", [4, 6], float32), 0, 1)
        v0 = aten.mul.Tensor(p.transposed_0_1, p.transposed_0_1)
        return v0
        """,
    )


def test_a_small_param_may_be_had_twice() -> None:
    applied = apply(
        fold_param_views,
        """
        p: param(float32, 4, 4)
        a = aten.transpose.int(p, 0, 1)
        z = aten.mul.Tensor(a, p)
        return z
        """,
    )

    assert len(applied.ctx.params) == 2


LARGE = """
x: input(float32, T, 8)
p: param(float32, 131072, 16)
q = aten.transpose.int(p, 0, 1)
z = aten.neg(q)
r = {other}
return z, r
"""


def test_a_large_one_is_not_held_twice() -> None:
    assert_leaves(fold_param_views, LARGE.format(other="aten.exp(p)"))


def test_but_its_parts_are() -> None:
    applied = apply(fold_param_views, LARGE.format(other="aten.slice.Tensor(p, 1, 0, 4, 1)"))

    assert sorted(info.name for info in applied.ctx.params.values()) == ["p.sliced_1_0_4", "p.transposed_0_1"]


@pytest.mark.parametrize(
    "call",
    [
        pytest.param("aten.slice.Tensor(p, 1, 0, 6, 2)", id="every second element"),
        pytest.param("aten.transpose.int(x, 0, 1)", id="no param"),
        pytest.param("aten.exp(p)", id="a computation"),
    ],
)
def test_what_no_recipe_says_stays(call: str) -> None:
    assert_leaves(fold_param_views, f"x: input(float32, 4, 6)\np: param(float32, 4, 6)\nq = {call}\nreturn q\n")
