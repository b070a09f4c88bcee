"""The passes of the normalise stage: one spelling for each thing, and nothing that does nothing."""

from __future__ import annotations

import pytest
from fx_text import apply, assert_leaves, assert_rewrites

from precast.builder.passes.normalise.arithmetic import normalise_linear
from precast.builder.passes.normalise.canonical import merge_duplicates, order_nodes
from precast.builder.passes.normalise.views import normalise_views, remove_noops

# --- remove_noops ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        "aten.alias(x)",
        "aten.contiguous(x)",
        "aten.clone(x)",
        "aten.detach(x)",
        "aten.dropout(x, 0.1, False)",
        "aten.to.dtype(x, float32)",
        "aten.slice.Tensor(x, 1, 0, 9223372036854775807, 1)",
        "aten.expand(x, [1, -1, 8])",
        "aten.reshape(x, [1, -1, 8])",
        "aten.mul.Tensor(x, 1.0)",
        "aten.mul.Tensor(x, 1)",
    ],
)
def test_what_changes_nothing_goes(call: str) -> None:
    assert_rewrites(
        remove_noops,
        f"""
        x: input(float32, 1, T, 8)
        y = {call}
        z = aten.neg(y)
        return z
        """,
        """
        v0 = aten.neg.default(x)
        return v0
        """,
    )


@pytest.mark.parametrize(
    "call",
    [
        "aten.to.dtype(x, bfloat16)",
        "aten.slice.Tensor(x, 2, 0, 7, 1)",
        "aten.slice.Tensor(x, 2, 0, 8, 2)",
        "aten.expand(x, [3, -1, 8])",
        "aten.reshape(x, [1, -1, 4])",
        "aten.mul.Tensor(x, 1.0001)",
        "aten.mul.Tensor(x, x)",
    ],
)
def test_what_changes_something_stays(call: str) -> None:
    assert_leaves(
        remove_noops,
        f"""
        x: input(float32, 1, T, 8)
        y = {call}
        return y
        """,
    )


def test_a_product_that_makes_another_type_stays() -> None:
    assert_leaves(
        remove_noops,
        """
        x: input(int64, 1, T)
        y = aten.mul.Tensor(x, 1.0)
        return y
        """,
    )


# --- normalise_views ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("aten.view(x, [1, -1, 2, 4])", "aten.reshape.default(x, [1, -1, 2, 4])"),
        ("aten.flatten.using_ints(x, 1)", "aten.reshape.default(x, [1, -1])"),
        ("aten.unflatten.int(x, 2, [2, 4])", "aten.reshape.default(x, [1, -1, 2, 4])"),
        ("aten.type_as(x, ids)", "aten.to.dtype(x, int64)"),
        ("aten._to_copy(x, dtype=bfloat16)", "aten.to.dtype(x, bfloat16)"),
        ("aten.transpose.int(x, -1, -2)", "aten.transpose.int(x, 2, 1)"),
        ("aten.unsqueeze(x, -1)", "aten.unsqueeze.default(x, 3)"),
        ("aten.select.int(x, -1, 3)", "aten.select.int(x, 2, 3)"),
        ("aten.slice.Tensor(x, -1, 0, 4)", "aten.slice.Tensor(x, 2, 0, 4, 1)"),
        ("aten.slice.Tensor(x, 2, -3, 9223372036854775807)", "aten.slice.Tensor(x, 2, 5, 8, 1)"),
        ("aten.slice.Tensor(x, 2, 2, -1, 2)", "aten.slice.Tensor(x, 2, 2, 7, 2)"),
        ("aten.slice.Tensor(x, 2)", "aten.slice.Tensor(x, 2, 0, 8, 1)"),
        ("aten.cat([x, x], -1)", "aten.cat.default([x, x], 2)"),
        ("aten.cat([x, x])", "aten.cat.default([x, x], 0)"),
        ("aten.stack([x, x], -1)", "aten.stack.default([x, x], 3)"),
    ],
)
def test_one_spelling_for_each_view(call: str, expected: str) -> None:
    assert_rewrites(
        normalise_views,
        f"""
        x: input(float32, 1, T, 8)
        ids: input(int64, 1, T)
        y = {call}
        return y
        """,
        f"""
        v0 = {expected}
        return v0
        """,
    )


@pytest.mark.parametrize(
    "split",
    ["aten.split.Tensor(x, 3, -1)", "aten.split_with_sizes(x, [3, 3, 2], -1)", "aten.chunk(x, 3, -1)"],
)
def test_splits_become_slices(split: str) -> None:
    assert_rewrites(
        normalise_views,
        f"""
        x: input(float32, 1, T, 8)
        parts = {split}
        first = item(parts, 0)
        last = item(parts, 2)
        return first, last
        """,
        """
        v0 = aten.slice.Tensor(x, 2, 0, 3, 1)
        v1 = aten.slice.Tensor(x, 2, 6, 8, 1)
        return v0, v1
        """,
    )


def test_unbinding_becomes_selection() -> None:
    assert_rewrites(
        normalise_views,
        """
        x: input(float32, 1, T, 3, 4)
        parts = aten.unbind.int(x, -2)
        last = item(parts, 2)
        return last
        """,
        """
        v0 = aten.select.int(x, 2, 2)
        return v0
        """,
    )


def test_empty_parts_of_a_concatenation_go() -> None:
    assert_rewrites(
        normalise_views,
        """
        x: input(float32, 1, T, 8)
        nothing = aten.slice.Tensor(x, 2, 8, 8, 1)
        y = aten.cat([x, nothing, x], 2)
        z = aten.cat([y, nothing], 2)
        return z
        """,
        """
        v0 = aten.cat.default([x, x], 2)
        return v0
        """,
    )


def test_views_in_normal_form_stay() -> None:
    assert_leaves(
        normalise_views,
        """
        x: input(float32, 1, T, 8)
        a = aten.reshape(x, [1, -1, 2, 4])
        b = aten.transpose.int(a, 1, 2)
        c = aten.slice.Tensor(b, 3, 0, 2, 1)
        d = aten.to.dtype(c, bfloat16)
        e = aten.cat([d, d], 3)
        return e
        """,
    )


# --- normalise_linear --------------------------------------------------------------------------------------------

CONV1D = """
x: input(float32, 1, T, 8)
w: {kind}(float32, 8, 6)
bias: param(float32, 6)
flat = aten.reshape(x, [-1, 8])
product = aten.addmm(bias, flat, w{alpha})
y = aten.reshape(product, {shape})
return y
"""


def test_a_product_with_a_transposed_weight_becomes_linear() -> None:
    assert_rewrites(
        normalise_linear,
        CONV1D.format(kind="param", alpha="", shape="[1, -1, 6]"),
        """
        w.transposed = transpose(read("w", [8, 6], float32), 0, 1)
        v0 = aten.linear.default(x, w.transposed, bias)
        return v0
        """,
    )


@pytest.mark.parametrize(
    "differs",
    [
        pytest.param({"kind": "input"}, id="the weight is no param"),
        pytest.param({"alpha": ", alpha=2"}, id="the product is scaled"),
        pytest.param({"shape": "[1, -1, 2, 3]"}, id="the result has heads"),
    ],
)
def test_other_products_stay(differs: dict[str, str]) -> None:
    usual = {"kind": "param", "alpha": "", "shape": "[1, -1, 6]"}

    assert_leaves(normalise_linear, CONV1D.format(**{**usual, **differs}))


# --- merge_duplicates --------------------------------------------------------------------------------------------


def test_equal_calls_become_one() -> None:
    assert_rewrites(
        merge_duplicates,
        """
        x: input(float32, 1, T, 8)
        a = aten.slice.Tensor(x, 2, 0, 4, 1)
        b = aten.slice.Tensor(x, 2, 0, 4, 1)
        c = aten.neg(a)
        d = aten.neg(b)
        y = aten.cat([c, d], 2)
        return y
        """,
        """
        v0 = aten.slice.Tensor(x, 2, 0, 4, 1)
        v1 = aten.neg.default(v0)
        v2 = aten.cat.default([v1, v1], 2)
        return v2
        """,
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("aten.mul.Tensor(x, 1)", "aten.mul.Tensor(x, 1.0)"),
        ("aten.gelu(x)", "aten.gelu(x, approximate='tanh')"),
        ("aten.slice.Tensor(x, 2, 0, 4, 1)", "aten.slice.Tensor(x, 2, 4, 8, 1)"),
    ],
)
def test_calls_that_differ_stay(first: str, second: str) -> None:
    assert_leaves(
        merge_duplicates,
        f"""
        x: input(float32, 1, T, 8)
        a = {first}
        b = {second}
        return a, b
        """,
    )


def test_equal_calls_of_two_layers_stay() -> None:
    assert_leaves(
        merge_duplicates,
        """
        x: input(float32, 1, T, 8)
        with layer("layers.0"):
            a = aten.neg(x)
        with layer("layers.1"):
            b = aten.neg(x)
        return a, b
        """,
    )


def test_what_writes_into_an_argument_is_not_merged() -> None:
    assert_leaves(
        merge_duplicates,
        """
        k: input(float32, 1, T, 2, 4)
        k_cache: input(float32, 4, 16, 2, 4)
        slot_mapping: input(int64, T)
        precast.write_kv(k, k, k_cache, k_cache, slot_mapping)
        precast.write_kv(k, k, k_cache, k_cache, slot_mapping)
        return k_cache
        """,
    )


# --- order_nodes -------------------------------------------------------------------------------------------------

TWO_KINDS = """
x: input(float32, 1, T, 8)
p: input(float32, 1, T, 8)
{prelude}
with layer("layers.0"):
    h = aten.mul.Tensor(x, sliding)
with layer("layers.1"):
    i = aten.mul.Tensor(h, full)
{end}
"""
SLIDING = "s = aten.sin(p)\nsliding = aten.neg(s)\n"
FULL = "f = aten.cos(p)\nfull = aten.neg(f)\n"
BOTH = "y = aten.tanh(i)\nreturn y"


def test_nodes_outside_of_layers_are_in_the_order_of_their_use() -> None:
    assert_rewrites(
        order_nodes,
        TWO_KINDS.format(prelude=FULL + SLIDING, end=BOTH),
        """
        v0 = aten.sin.default(p)
        v1 = aten.neg.default(v0)
        v2 = aten.cos.default(p)
        v3 = aten.neg.default(v2)
        v4 = aten.mul.Tensor(x, v1)
        v5 = aten.mul.Tensor(v4, v3)
        v6 = aten.tanh.default(v5)
        return v6
        """,
    )


def test_nodes_in_the_order_of_their_use_stay() -> None:
    assert_leaves(order_nodes, TWO_KINDS.format(prelude=SLIDING + FULL, end=BOTH))


def test_arguments_are_in_the_order_of_their_use() -> None:
    one, two = "f = aten.cos(p)\ns = aten.sin(p)\n", "s = aten.sin(p)\nf = aten.cos(p)\n"
    text = "p: input(float32, 1, T, 8)\n{}y = aten.sub.Tensor(f, s)\nreturn y"

    assert_leaves(order_nodes, text.format(one))
    assert apply(order_nodes, text.format(two)).text == apply(order_nodes, text.format(one)).text


def test_a_later_run_decides_about_an_earlier_one() -> None:
    """What uses the tables last is itself out of order, and put in order first."""
    text = """
    x: input(float32, 1, T, 8)
    a = aten.cos(x)
    b = aten.sin(x)
    with layer("layers.0"):
        h = aten.neg(x)
    c = aten.mul.Tensor(h, a)
    d = aten.mul.Tensor(h, b)
    y = aten.sub.Tensor(d, c)
    return y
    """

    assert_rewrites(
        order_nodes,
        text,
        """
        v0 = aten.sin.default(x)
        v1 = aten.cos.default(x)
        v2 = aten.neg.default(x)
        v3 = aten.mul.Tensor(v2, v0)
        v4 = aten.mul.Tensor(v2, v1)
        v5 = aten.sub.Tensor(v3, v4)
        return v5
        """,
    )


def test_nodes_of_a_layer_stay_as_they_were_traced() -> None:
    assert_leaves(
        order_nodes,
        """
        x: input(float32, 1, T, 8)
        with layer("layers.0"):
            a = aten.cos(x)
            b = aten.sin(x)
            y = aten.sub.Tensor(b, a)
        return y
        """,
    )


def test_what_only_writes_stays() -> None:
    assert_leaves(
        order_nodes,
        """
        k: input(float32, 1, T, 2, 4)
        k_cache: input(float32, 4, 16, 2, 4)
        slot_mapping: input(int64, T)
        precast.write_kv(k, k, k_cache, k_cache, slot_mapping)
        y = aten.neg(k)
        return y
        """,
    )
