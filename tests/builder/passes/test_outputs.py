"""The outputs of products in the order in which they are used."""

from __future__ import annotations

import pytest
from fx_text import apply, assert_leaves, assert_rewrites

from precast.builder.passes.match.outputs import order_outputs
from precast.ir.weights import recipes

GROUPS = """
x: input(float32, 1, T, 4)
w: param(float32, 24, 4)
y = aten.linear(x, w)
groups = aten.reshape(y, [1, -1, 3, 8])
q = aten.slice.Tensor(groups, 3, 0, 2, 1)
v = aten.slice.Tensor(groups, 3, 2, 8, 1)
heads = aten.reshape(v, [1, -1, 9, 2])
a = aten.neg(q)
b = aten.exp(heads)
return a, b
"""


def test_parts_of_groups_are_slices() -> None:
    """Three groups of a query and three values each: the values of all groups come to lie side by side."""
    assert_rewrites(
        order_outputs,
        GROUPS,
        """
        ordered.w = concat([reshape(slice(reshape(read("w", [24, 4], float32), [1, 3, 8, 4]), dim=2, start=0, length=2), [6, 4]), reshape(slice(reshape(read("w", [24, 4], float32), [1, 3, 8, 4]), dim=2, start=2, length=6), [18, 4])], dim=0)
        v0 = aten.linear.default(x, ordered.w)
        v1 = aten.slice.Tensor(v0, 2, 0, 6, 1)
        v2 = aten.slice.Tensor(v0, 2, 6, 24, 1)
        v3 = aten.reshape.default(v1, [1, -1, 3, 2])
        v4 = aten.reshape.default(v2, [1, -1, 9, 2])
        v5 = aten.neg.default(v3)
        v6 = aten.exp.default(v4)
        return v5, v6
        """,  # noqa: E501
    )


def test_parts_that_are_joined_are_one_slice() -> None:
    """As a delta layer joins queries, keys and values for its convolution; the product has a bias."""
    applied = apply(
        order_outputs,
        """
        x: input(float32, 1, T, 4)
        w: param(float32, 24, 4)
        bias: param(float32, 24)
        y = aten.linear(x, w, bias)
        groups = aten.reshape(y, [1, -1, 2, 12])
        z = aten.slice.Tensor(groups, 3, 6, 12, 1)
        q = aten.slice.Tensor(groups, 3, 0, 2, 1)
        v = aten.slice.Tensor(groups, 3, 2, 6, 1)
        q_all = aten.reshape(q, [1, -1, 4])
        v_all = aten.reshape(v, [1, -1, 8])
        qv = aten.cat([q_all, v_all], 2)
        a = aten.neg(qv)
        b = aten.exp(z)
        return a, b
        """,
    )

    made = applied.text.splitlines()
    assert "cat" not in "".join(made[2:])
    assert [recipes.shape(info.recipe) for info in applied.ctx.params.values()] == [(24, 4), (24,)]
    assert "v1 = aten.slice.Tensor(v0, 2, 0, 12, 1)" in made


def test_pairs_become_halves_of_heads_before_tokens() -> None:
    """As latent attention takes the rotated part of its heads apart."""
    applied = apply(
        order_outputs,
        """
        x: input(float32, 1, T, 4)
        w: param(float32, 24, 4)
        y = aten.linear(x, w)
        heads = aten.reshape(y, [1, -1, 3, 8])
        first = aten.transpose.int(heads, 1, 2)
        turned = aten.slice.Tensor(first, 3, 4, 8, 1)
        even = aten.slice.Tensor(turned, 3, 0, 4, 2)
        odd = aten.slice.Tensor(turned, 3, 1, 4, 2)
        halves = aten.cat([even, odd], 3)
        rest = aten.slice.Tensor(heads, 3, 0, 4, 1)
        a = aten.neg(halves)
        b = aten.exp(rest)
        return a, b
        """,
    )

    assert applied.text.splitlines()[1:] == [
        "v0 = aten.linear.default(x, ordered.w)",
        "v1 = aten.slice.Tensor(v0, 2, 0, 12, 1)",
        "v2 = aten.slice.Tensor(v0, 2, 12, 24, 1)",
        "v3 = aten.reshape.default(v2, [1, -1, 3, 4])",
        "v4 = aten.transpose.int(v3, 1, 2)",
        "v5 = aten.reshape.default(v1, [1, -1, 3, 4])",
        "v6 = aten.neg.default(v4)",
        "v7 = aten.exp.default(v5)",
        "return v6, v7",
    ]


def test_a_part_seen_in_two_ways_is_one_part() -> None:
    applied = apply(
        order_outputs,
        GROUPS.replace("return a, b", "all = aten.reshape(v, [1, -1, 18])\nc = aten.sin(all)\nreturn a, b, c"),
    )

    assert applied.changed
    assert applied.text.count("aten.slice.Tensor") == 2


@pytest.mark.parametrize(
    "edits",
    [
        pytest.param(
            {"heads = aten.reshape(v, [1, -1, 9, 2])": "heads = aten.slice.Tensor(v, 3, 0, 6, 1)"}, id="views"
        ),
        pytest.param({"return a, b": "c = aten.sin(y)\nreturn a, b, c"}, id="the product is used"),
        pytest.param({"return a, b": "c = aten.sin(groups)\nreturn a, b, c"}, id="its groups are used"),
        pytest.param({"return a, b": "c = aten.sin(w)\nreturn a, b, c"}, id="the weight is used"),
        pytest.param({"w: param": "w: input"}, id="a weight that is no param"),
        pytest.param({"3, 0, 2, 1)": "3, 0, 3, 1)"}, id="parts that overlap"),
        pytest.param({"3, 2, 8, 1)": "3, 4, 8, 1)", "[1, -1, 9, 2]": "[1, -1, 6, 2]"}, id="outputs that nothing uses"),
        pytest.param({"[1, -1, 9, 2]": "[-1, 2]"}, id="tokens among the parts"),
        pytest.param(
            {"groups = aten.reshape(y, [1, -1, 3, 8])": "s = aten.sin(y)\ngroups = aten.reshape(s, [1, -1, 3, 8])"},
            id="not of the product",
        ),
    ],
)
def test_near_ordered_outputs(edits: dict[str, str]) -> None:
    text = GROUPS
    for old, new in edits.items():
        assert old in text
        text = text.replace(old, new)

    assert_leaves(order_outputs, text)
