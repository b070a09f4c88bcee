"""Rotary embeddings: their tables, and the rotation of heads by them."""

from __future__ import annotations

from typing import Any

import pytest
from fx_text import apply, assert_leaves, assert_rewrites

from precast.builder.passes.match.rotary import match_rotary
from precast.builder.passes.match.rotary_tables import match_rotary_tables

# --- tables ------------------------------------------------------------------------------------------------------

TABLES = """
positions: input({positions}, 1, T)
inv_freq: {inv_freq}
column = aten.unsqueeze(positions, 2)
wide = aten.to.dtype(column, float32)
angles = aten.mul.Tensor(wide, inv_freq)
both = {both}
c = aten.cos(both)
s = aten.sin(both)
{behind}
return c, s
"""
HALVES = {
    "positions": "int64", "inv_freq": "constant(float32, [1.0, 0.5, 0.25])", "both": "aten.cat([angles, angles], 2)",
    "behind": "",
}  # fmt: skip


def test_tables_of_halves() -> None:
    assert_rewrites(
        match_rotary_tables,
        TABLES.format(**HALVES),
        """
        v0 = precast.rotary_tables(positions, inv_freq, scale=1.0, dtype=float32)
        v1 = v0[0]
        v2 = v0[1]
        v3 = aten.cat.default([v1, v1], 2)
        v4 = aten.cat.default([v2, v2], 2)
        return v3, v4
        """,
    )


@pytest.mark.parametrize("dim", ["-1", "2"])
def test_tables_of_pairs(dim: str) -> None:
    pairs = f"aten.repeat_interleave.self_int(angles, 2, {dim})"

    assert_rewrites(
        match_rotary_tables,
        TABLES.format(**{**HALVES, "both": pairs}),
        """
        v0 = precast.rotary_tables(positions, inv_freq, scale=1.0, dtype=float32)
        v1 = v0[0]
        v2 = v0[1]
        v3 = aten.repeat_interleave.self_int(v1, 2, 2)
        v4 = aten.repeat_interleave.self_int(v2, 2, 2)
        return v3, v4
        """,
    )


OUTER = """
positions: input({positions}, 1, T)
inv_freq: {inv_freq}
row = aten.unsqueeze(positions, {dim})
wide = aten.to.dtype(row, float32)
product = aten.matmul({factors})
angles = aten.transpose.int(product, 1, 2)
both = aten.cat([angles, angles], 2)
c = aten.cos(both)
s = aten.sin(both)
return c, s
"""
COLUMN = {
    "positions": "int64", "inv_freq": "constant(float32, [[[1.0], [0.5], [0.25]]])", "dim": 1,
    "factors": "inv_freq, wide",
}  # fmt: skip


def test_tables_of_an_outer_product() -> None:
    assert_rewrites(
        match_rotary_tables,
        OUTER.format(**COLUMN),
        """
        v0 = aten.reshape.default(inv_freq, [-1])
        v1 = precast.rotary_tables(positions, v0, scale=1.0, dtype=float32)
        v2 = v1[0]
        v3 = v1[1]
        v4 = aten.cat.default([v2, v2], 2)
        v5 = aten.cat.default([v3, v3], 2)
        return v4, v5
        """,
    )


@pytest.mark.parametrize(
    "differs",
    [
        pytest.param({"positions": "float32"}, id="positions that are no integers"),
        pytest.param(
            {"dim": 2, "factors": "wide, inv_freq", "inv_freq": "constant(float32, [[[1.0, 0.5]]])"}, id="turned"
        ),
        pytest.param({"inv_freq": "constant(float32, [[1.0], [0.5], [0.25]])"}, id="frequencies without a batch"),
    ],
)
def test_near_outer_products(differs: dict[str, Any]) -> None:
    assert_leaves(match_rotary_tables, OUTER.format(**{**COLUMN, **differs}))


def test_frequencies_of_each_token() -> None:
    text = TABLES.format(**{**HALVES, "inv_freq": "input(float32, 1, T, 3)"})

    assert "v0 = precast.rotary_tables(positions, inv_freq, scale=1.0" in apply(match_rotary_tables, text).text


def test_scale_and_conversion_belong_to_the_tables() -> None:
    behind = """
c = aten.mul.Tensor(c, 1.25)
s = aten.mul.Tensor(s, 1.25)
c = aten.to.dtype(c, bfloat16)
s = aten.to.dtype(s, bfloat16)
"""

    text = apply(match_rotary_tables, TABLES.format(**{**HALVES, "behind": behind})).text

    assert "rotary_tables(positions, inv_freq, scale=1.25, dtype=bfloat16)" in text
    assert "mul" not in text
    assert "to.dtype" not in text


def test_a_scale_behind_the_conversion_stays() -> None:
    """There it is rounded to the narrow type twice."""
    behind = """
c = aten.to.dtype(c, bfloat16)
s = aten.to.dtype(s, bfloat16)
c = aten.mul.Tensor(c, 1.1)
s = aten.mul.Tensor(s, 1.1)
"""

    text = apply(match_rotary_tables, TABLES.format(**{**HALVES, "behind": behind})).text

    assert "scale=1.0, dtype=bfloat16" in text
    assert text.count("aten.mul.Tensor") == 2


@pytest.mark.parametrize(
    "differs",
    [
        pytest.param({"behind": "c = aten.mul.Tensor(c, 1.5)"}, id="two scales"),
        pytest.param({"behind": "c = aten.to.dtype(c, bfloat16)"}, id="two types"),
        pytest.param({"behind": "s = aten.cos(both)"}, id="no sine"),
        pytest.param({"both": "aten.cat([angles, angles, angles], 2)"}, id="three parts"),
        pytest.param({"both": "aten.cat([angles, angles], 1)"}, id="tokens twice"),
        pytest.param({"both": "aten.repeat_interleave.self_int(angles, 2, 1)"}, id="pairs of tokens"),
        pytest.param({"both": "aten.repeat_interleave.self_int(angles, 3, 2)"}, id="triples"),
        pytest.param({"inv_freq": "constant(bfloat16, [1.0, 0.5, 0.25])"}, id="narrow frequencies"),
        pytest.param({"inv_freq": "constant(float32, [[[1.0, 0.5, 0.25]]])"}, id="frequencies of one token"),
        pytest.param({"positions": "float32"}, id="positions that are no integers"),
    ],
)
def test_near_rotary_tables(differs: dict[str, str]) -> None:
    assert_leaves(match_rotary_tables, TABLES.format(**{**HALVES, **differs}))


# --- rotation ----------------------------------------------------------------------------------------------------

ROTATION = """
x: input(float32, {shape})
c: input(float32, 1, T, {table})
s: input(float32, 1, T, {table})
wide_c = aten.cat([c, c], 2)
wide_s = aten.cat([s, s], 2)
heads_c = aten.unsqueeze(wide_c, {heads})
heads_s = aten.unsqueeze(wide_s, {heads})
lower = aten.slice.Tensor(x, 3, 0, {half}, 1)
upper = aten.slice.Tensor(x, 3, {half}, {size}, 1)
turned = aten.neg({negated})
rotated = aten.cat([{parts}], 3)
a = aten.mul.Tensor(x, heads_c)
b = aten.mul.Tensor(rotated, heads_s)
y = aten.{sum}.Tensor(a, b)
return y
"""
HEADS_FIRST = {
    "shape": "1, 2, T, 8", "table": 4, "heads": 1, "half": 4, "size": 8, "negated": "upper", "parts": "turned, lower",
    "sum": "add",
}  # fmt: skip


def test_heads_before_tokens() -> None:
    assert_rewrites(
        match_rotary,
        ROTATION.format(**HEADS_FIRST),
        """
        v0 = aten.transpose.int(x, 1, 2)
        v1 = precast.rotary(v0, c, s, interleaved=False)
        v2 = aten.transpose.int(v1, 1, 2)
        return v2
        """,
    )


def test_heads_behind_tokens() -> None:
    assert_rewrites(
        match_rotary,
        ROTATION.format(**{**HEADS_FIRST, "shape": "1, T, 2, 8", "heads": 2}),
        """
        v0 = precast.rotary(x, c, s, interleaved=False)
        return v0
        """,
    )


@pytest.mark.parametrize(
    "differs",
    [
        pytest.param({"half": 2}, id="unequal parts"),
        pytest.param({"sum": "sub"}, id="a difference"),
        pytest.param({"negated": "lower", "parts": "upper, turned"}, id="turned the other way"),
        pytest.param({"parts": "lower, turned"}, id="not exchanged"),
        pytest.param({"shape": "1, T, 1, 8", "heads": 0, "table": 4}, id="tables of no head dimension"),
    ],
)
def test_near_a_rotation(differs: dict[str, str | int]) -> None:
    assert_leaves(match_rotary, ROTATION.format(**{**HEADS_FIRST, **differs}))


def test_a_table_that_is_not_doubled() -> None:
    """The table's halves differ: it turns the two elements of a pair by different angles."""
    text = ROTATION.format(**HEADS_FIRST).replace("[c, c]", "[c, s]")

    assert_leaves(match_rotary, text)


def test_another_tensor_is_rotated() -> None:
    text = ROTATION.format(**HEADS_FIRST).replace("a = aten.mul.Tensor(x,", "z = aten.tanh(x)\na = aten.mul.Tensor(z,")

    assert_leaves(match_rotary, text)


PAIRS = """
x: input(float32, 1, T, 2, 8)
c: input(float32, 1, T, 4)
s: input(float32, 1, T, 4)
wide_c = aten.repeat_interleave.self_int(c, 2, 2)
wide_s = aten.repeat_interleave.self_int(s, 2, 2)
heads_c = aten.unsqueeze(wide_c, 2)
heads_s = aten.unsqueeze(wide_s, 2)
even = aten.slice.Tensor(x, 3, 0, 8, {step})
odd = aten.slice.Tensor(x, 3, 1, 8, 2)
turned = aten.neg(odd)
pairs = aten.stack([{parts}], 4)
rotated = aten.reshape(pairs, [1, -1, 2, 8])
a = aten.mul.Tensor(x, heads_c)
b = aten.mul.Tensor(rotated, heads_s)
y = aten.add.Tensor(a, b)
return y
"""


def test_interleaved_pairs() -> None:
    assert_rewrites(
        match_rotary,
        PAIRS.format(step=2, parts="turned, even"),
        """
        v0 = precast.rotary(x, c, s, interleaved=True)
        return v0
        """,
    )


def test_near_interleaved_pairs() -> None:
    assert_leaves(match_rotary, PAIRS.format(step=2, parts="even, turned"))


HALF_PRECISION = """
x: input(bfloat16, 1, T, 2, 8)
c: input(float32, 1, T, 4)
s: input(float32, 1, T, 4)
wide_c = aten.cat([c, c], 2)
wide_s = aten.cat([s, s], 2)
heads_c = aten.unsqueeze(wide_c, 2)
heads_s = aten.unsqueeze(wide_s, 2)
{wide}
lower = aten.slice.Tensor(x, 3, 0, 4, 1)
upper = aten.slice.Tensor(x, 3, 4, 8, 1)
turned = aten.neg(upper)
rotated = aten.cat([turned, lower], 3)
a = aten.mul.Tensor(x, heads_c)
b = aten.mul.Tensor(rotated, heads_s)
y = aten.add.Tensor(a, b)
{behind}
return y
"""


@pytest.mark.parametrize("wide", ["x = aten.to.dtype(x, float32)", ""])
def test_half_precision_is_rotated_in_float32(wide: str) -> None:
    assert_rewrites(
        match_rotary,
        HALF_PRECISION.format(wide=wide, behind="y = aten.to.dtype(y, bfloat16)"),
        """
        v0 = precast.rotary(x, c, s, interleaved=False)
        return v0
        """,
    )


def test_a_result_that_stays_wide_is_no_rotation_of_narrow_heads() -> None:
    assert_leaves(match_rotary, HALF_PRECISION.format(wide="", behind=""))


PARTIAL = """
x: input(float32, 1, 2, T, 8)
c: input(float32, 1, T, 2)
s: input(float32, 1, T, 2)
first = aten.slice.Tensor(x, 3, 0, 4, 1)
heads_last = aten.transpose.int(first, 1, 2)
turned = precast.rotary(heads_last, c, s, interleaved=False)
heads_first = aten.transpose.int(turned, 1, 2)
rest = aten.slice.Tensor(x, 3, {start}, {end}, 1)
y = aten.cat([{parts}], 3)
return y
"""


def test_a_part_that_passes_through_is_taken_in() -> None:
    assert_rewrites(
        match_rotary,
        PARTIAL.format(start=4, end=8, parts="heads_first, rest"),
        """
        v0 = aten.transpose.int(x, 1, 2)
        v1 = precast.rotary(v0, c, s, interleaved=False)
        v2 = aten.transpose.int(v1, 1, 2)
        return v2
        """,
    )


@pytest.mark.parametrize(
    "differs",
    [
        pytest.param({"end": 6}, id="the end is dropped"),
        pytest.param({"start": 6}, id="a gap"),
        pytest.param({"parts": "rest, heads_first"}, id="the other order"),
    ],
)
def test_near_a_partial_rotation(differs: dict[str, str | int]) -> None:
    usual = {"start": 4, "end": 8, "parts": "heads_first, rest"}

    assert_leaves(match_rotary, PARTIAL.format(**{**usual, **differs}))
