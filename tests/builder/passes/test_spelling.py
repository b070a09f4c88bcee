"""Rarely used ops and arithmetic: what each becomes, and what only looks like it."""

from __future__ import annotations

import pytest
from fx_text import apply, assert_leaves

from precast.builder.passes.graph_pass import Pass
from precast.builder.passes.match.spelling import normalise_spelling
from precast.builder.passes.normalise.arithmetic import normalise_arithmetic
from precast.builder.passes.normalise.writes import remove_self_copies

INPUTS = """
x: input(float32, T, 8)
h: input(bfloat16, T, 8)
i: input(int64, T, 8)
ids: input(int64, 1, T)
b: input(bool, T, 8)
table: param(float32, 50, 8)
flat: param(float32, 50)
last: constant(int64, [-1])
third: constant(int64, [2])
few: constant(int64, [2, -1])
half: constant(float32, 0.5)
"""


def assert_becomes(step: Pass, body: str, expected: str) -> None:
    """`y` of the body, over the inputs above, is what `expected` says: the calls, separated by `;`."""
    found = apply(step, f"{INPUTS}{body}\nreturn y")
    *calls, result = found.text.splitlines()
    assert [call.partition(" = ")[2].removesuffix(";") for call in calls] == expected.split("; "), found.text
    assert result == f"return v{len(calls) - 1}"
    assert found.changed


def assert_stays(step: Pass, body: str) -> None:
    assert_leaves(step, f"{INPUTS}{body}\nreturn y")


COLUMN = "s = aten.slice.Tensor(x, 1, 0, 1)\n"
SCORES = "t = aten.transpose.int(x, 0, 1)\nq = aten.matmul(x, t)\n"


# --- shapes and indices ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            "y = aten.stack([x, x])",
            "aten.unsqueeze.default(x, 0); aten.unsqueeze.default(x, 0); aten.cat.default([v0, v1], 0)",
        ),
        (
            "y = aten.stack([x, x], -1)",
            "aten.unsqueeze.default(x, 2); aten.unsqueeze.default(x, 2); aten.cat.default([v0, v1], 2)",
        ),
        (
            "y = aten.repeat(x, [1, 3])",
            "aten.unsqueeze.default(x, 1); aten.expand.default(v0, [-1, 3, -1]); aten.reshape.default(v1, [-1, 24])",
        ),
        (
            "y = aten.repeat(x, [2, 1])",
            "aten.unsqueeze.default(x, 0); aten.expand.default(v0, [2, -1, -1]); aten.reshape.default(v1, [-1, 8])",
        ),
        (
            "y = aten.repeat(x, [2, 1, 1])",
            "aten.unsqueeze.default(x, 0); aten.unsqueeze.default(v0, 0); aten.expand.default(v1, [2, -1, -1, -1]); "
            "aten.squeeze.dim(v2, 1)",
        ),
        (
            "y = aten.repeat_interleave.self_int(x, 3, -1)",
            "aten.unsqueeze.default(x, 2); aten.expand.default(v0, [-1, -1, 3]); aten.reshape.default(v1, [-1, 24])",
        ),
        (
            "y = aten.repeat_interleave.self_int(x, 3, 0)",
            "aten.unsqueeze.default(x, 1); aten.expand.default(v0, [-1, 3, -1]); aten.reshape.default(v1, [-1, 8])",
        ),
        (
            f"{COLUMN}y = aten.repeat_interleave.self_int(s, 4, 1)",
            "aten.slice.Tensor(x, 1, 0, 1); aten.unsqueeze.default(v0, 2); aten.expand.default(v1, [-1, -1, 4]); "
            "aten.squeeze.dim(v2, 1)",
        ),
        ("y = aten.mT(x)", "aten.transpose.int(x, 0, 1)"),
        ("y = aten.concatenate([x, x], -1)", "aten.cat.default([x, x], 1)"),
        ("y = aten.concat([x, x])", "aten.cat.default([x, x], 0)"),
        (f"{COLUMN}y = aten.expand_as(s, x)", "aten.slice.Tensor(x, 1, 0, 1); aten.expand.default(v0, [-1, 8])"),
        (
            "s = aten.slice.Tensor(x, 0, 0, 1)\ny = aten.expand_as(s, x)",
            "aten.slice.Tensor(x, 0, 0, 1); aten.sym_size.int(x, 0); aten.expand.default(v0, [v1, -1])",
        ),
        (
            f"{COLUMN}a, c = aten.broadcast_tensors([s, x])\ny = aten.add.Tensor(a, c)",
            "aten.slice.Tensor(x, 1, 0, 1); aten.expand.default(v0, [-1, 8]); aten.add.Tensor(v1, x)",
        ),
        ("y = aten.index.Tensor(table, [ids])", "aten.embedding.default(table, ids)"),
        (
            "y = aten.index.Tensor(flat, [ids])",
            "aten.unsqueeze.default(flat, 1); aten.embedding.default(v0, ids); aten.squeeze.dim(v1, 2)",
        ),
        ("y = aten.index.Tensor(x, [None, last])", "aten.slice.Tensor(x, 1, 7, 8, 1)"),
        ("y = aten.index.Tensor(x, [None, third])", "aten.slice.Tensor(x, 1, 2, 3, 1)"),
        ("y = aten.index.Tensor(table, [last])", "aten.slice.Tensor(table, 0, 49, 50, 1)"),
        ("y = aten.index_select(table, 0, third)", "aten.embedding.default(table, third)"),
    ],
)
def test_another_spelling_of_a_shape(body: str, expected: str) -> None:
    assert_becomes(normalise_spelling, body, expected)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("y = aten.repeat_interleave.self_int(x, 3)", id="over all elements"),
        pytest.param(f"{SCORES}y = aten.repeat(q, [2, 1])", id="two sizes over symbols"),
        pytest.param("y = aten.index.Tensor(x, [b])", id="by truth values"),
        pytest.param("y = aten.index.Tensor(x, [None, few])", id="two columns"),
        pytest.param("y = aten.index.Tensor(table, [few])", id="a row from the end"),
        pytest.param("y = aten.index.Tensor(x, [last])", id="from the end of all tokens"),
        pytest.param("y = aten.index.Tensor(x, [None, ids])", id="columns"),
        pytest.param("y = aten.index.Tensor(x, [ids, ids])", id="two indices"),
        pytest.param("u = aten.unsqueeze(x, 2)\ny = aten.index.Tensor(u, [ids])", id="three dimensions"),
        pytest.param("y = aten.index_select(x, 1, third)", id="columns, selected"),
        pytest.param("a, c = aten.split.Tensor(x, 4, 1)\ny = aten.add.Tensor(a, c)", id="results of another op"),
    ],
)
def test_near_another_spelling_of_a_shape(body: str) -> None:
    assert_stays(normalise_spelling, body)


# --- values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("y = aten._softmax(x, -1, False)", "aten.softmax.int(x, -1)"),
        ("y = aten.clamp.Tensor(x, x)", "aten.maximum.default(x, x)"),
        (f"{COLUMN}y = aten.clamp.Tensor(x, None, s)", "aten.slice.Tensor(x, 1, 0, 1); aten.minimum.default(x, v0)"),
        (
            f"{COLUMN}n = aten.neg(s)\ny = aten.clamp.Tensor(x, s, max=n)",
            "aten.slice.Tensor(x, 1, 0, 1); aten.neg.default(v0); aten.maximum.default(x, v0); "
            "aten.minimum.default(v2, v1)",
        ),
        ("y = aten.full_like(x, 2.5, pin_memory=False)", "aten.full_like.default(x, 2.5)"),
        ("y = aten.full_like(i, 2.5, dtype=float32)", "aten.to.dtype(i, float32); aten.full_like.default(v0, 2.5)"),
        ("y = aten.zeros_like(x)", "aten.full_like.default(x, 0)"),
        ("y = aten.ones_like(x, dtype=bool)", "aten.to.dtype(x, bool); aten.full_like.default(v0, 1)"),
    ],
)
def test_another_spelling_of_values(body: str, expected: str) -> None:
    assert_becomes(normalise_spelling, body, expected)


def test_what_is_filled_already_stays() -> None:
    assert_stays(normalise_spelling, "y = aten.full_like(x, 2.5)")


WIDE = "aten.to.dtype(h, float32); "


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("y = aten.square(x)", "aten.mul.Tensor(x, x)"),
        ("y = aten.mul.Scalar(x, 3)", "aten.mul.Tensor(x, 3)"),
        ("y = aten.multiply.Tensor(x, x)", "aten.mul.Tensor(x, x)"),
        ("y = aten.add.Scalar(x, 3)", "aten.add.Tensor(x, 3)"),
        ("y = aten.sub.Scalar(x, 3)", "aten.sub.Tensor(x, 3)"),
        ("y = aten.div.Scalar(i, 3)", "aten.div.Tensor(i, 3)"),
        (
            "t = aten.transpose.int(x, 0, 1)\ny = aten.mm(x, t)",
            "aten.transpose.int(x, 0, 1); aten.matmul.default(x, v0)",
        ),
        (
            "m = aten.unsqueeze(x, 0)\nn = aten.transpose.int(m, 1, 2)\ny = aten.bmm(m, n)",
            "aten.unsqueeze.default(x, 0); aten.transpose.int(v0, 1, 2); aten.matmul.default(v0, v1)",
        ),
        (
            "m = aten.unsqueeze(x, 0)\nn = aten.transpose.int(m, 1, 2)\no = aten.matmul(m, n)\n"
            "y = aten.baddbmm(o, m, n, beta=1, alpha=1.0)",
            "aten.unsqueeze.default(x, 0); aten.transpose.int(v0, 1, 2); aten.matmul.default(v0, v1); "
            "aten.matmul.default(v0, v1); aten.add.Tensor(v3, v2)",
        ),
        ("y = aten.greater.Scalar(x, 0.5)", "aten.gt.Scalar(x, 0.5)"),
        ("y = aten.min.other(x, h)", "aten.minimum.default(x, h)"),
        ("y = aten.max.other(x, h)", "aten.maximum.default(x, h)"),
        *(
            (
                f"n = aten.logical_not(b)\ny = aten.{op}(b, n)",
                f"aten.logical_not.default(b); aten.{least}.default(b, v0)",
            )
            for op, least in (
                ("logical_and", "minimum"),
                ("bitwise_and.Tensor", "minimum"),
                ("__and__.Tensor", "minimum"),
                ("logical_or", "maximum"),
                ("bitwise_or.Tensor", "maximum"),
                ("__or__.Tensor", "maximum"),
            )
        ),
        ("y = aten.clamp_min(x, 0.5)", "aten.clamp.default(x, 0.5)"),
        ("y = aten.reciprocal(i)", "aten.pow.Tensor_Scalar(i, -1.0)"),
        ("y = aten.sum.dim_IntList(x, [-1], dtype=float32)", "aten.sum.dim_IntList(x, [-1])"),
        (
            "y = aten.sum.dim_IntList(h, [-1], True, dtype=float32)",
            f"{WIDE}aten.sum.dim_IntList(v0, [-1], True)",
        ),
        ("y = aten.index_put(x, [b], half)", "aten.masked_fill.Scalar(x, b, 0.5)"),
        ("y = aten.index_put(i, [b], last)", "aten.masked_fill.Scalar(i, b, -1)"),
        ("y = aten.cat([x, h], 1)", "aten.to.dtype(h, float32); aten.cat.default([x, v0], 1)"),
        ("y = aten.cat([h, i, h])", "aten.to.dtype(i, bfloat16); aten.cat.default([h, v0, h])"),
        ("y = aten.where.ScalarSelf(b, 0.5, x)", "aten.masked_fill.Scalar(x, b, 0.5)"),
        (
            "y = aten.where.ScalarOther(b, x, 0.5)",
            "aten.logical_not.default(b); aten.masked_fill.Scalar(x, v0, 0.5)",
        ),
        (
            f"{COLUMN}m = aten.gt.Scalar(s, 0)\ny = aten.where.ScalarSelf(m, 0, x)",
            "aten.slice.Tensor(x, 1, 0, 1); aten.gt.Scalar(v0, 0); aten.masked_fill.Scalar(x, v1, 0)",
        ),
    ],
)
def test_another_spelling_of_arithmetic(body: str, expected: str) -> None:
    assert_becomes(normalise_arithmetic, body, expected)


NORM = "aten.mul.Tensor({0}, {0}); aten.sum.dim_IntList(v{1}, [-1], {2}); aten.sqrt.default(v{3})"
SPREAD = (
    "aten.mean.dim({0}, [-1], True); aten.sub.Tensor({0}, v{1}); aten.mul.Tensor(v{2}, v{2}); "
    "aten.sum.dim_IntList(v{3}, [-1], {5}); aten.div.Tensor(v{4}, {6})"
)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("y = aten.linalg_vector_norm(x, 2, [-1])", NORM.format("x", 0, False, 1)),
        ("y = aten.linalg_vector_norm(x, 2.0, [-1], True)", NORM.format("x", 0, True, 1)),
        (
            "y = aten.linalg_vector_norm(h, 2, [-1], True)",
            f"{WIDE}{NORM.format('v0', 1, True, 2)}; aten.to.dtype(v3, bfloat16)",
        ),
        ("y = aten.std.dim(x, [-1])", SPREAD.format("x", 0, 1, 2, 3, False, 7) + "; aten.sqrt.default(v4)"),
        ("y = aten.std.dim(x, [-1], False, True)", SPREAD.format("x", 0, 1, 2, 3, True, 8) + "; aten.sqrt.default(v4)"),
        ("y = aten.var.dim(x, [-1])", SPREAD.format("x", 0, 1, 2, 3, False, 7)),
        (
            "y = aten.std.dim(h, [-1], True, True)",
            f"{WIDE}{SPREAD.format('v0', 1, 2, 3, 4, True, 7)}; aten.sqrt.default(v5); aten.to.dtype(v6, bfloat16)",
        ),
        (
            "y = aten.rms_norm(x, [8], None, 0.001)",
            "precast.rms_norm(x, None, eps=0.001, cast_before_scale=False)",
        ),
        (
            "w = aten.select.int(table, 0, 0)\ny = aten.rms_norm(x, [8], w, 0.001)",
            "aten.select.int(table, 0, 0); precast.rms_norm(x, v0, eps=0.001, cast_before_scale=False)",
        ),
        (
            "y = aten.rms_norm(x, [8])",
            "precast.rms_norm(x, None, eps=1.1920928955078125e-07, cast_before_scale=False)",
        ),
        (  # small numbers, for which the epsilon of bfloat16 would show
            "z = aten.mul.Tensor(h, 0.01)\ny = aten.rms_norm(z, [8])",
            "aten.mul.Tensor(h, 0.01); precast.rms_norm(v0, None, eps=1.1920928955078125e-07, cast_before_scale=False)",
        ),
    ],
)
def test_another_spelling_of_a_norm(body: str, expected: str) -> None:
    assert_becomes(normalise_arithmetic, body, expected)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("y = aten.add.Scalar(x, 3, 2)", id="a multiple of the number"),
        pytest.param("y = aten.logical_and(x, b)", id="numbers as truth values"),
        pytest.param("y = aten.bitwise_or.Tensor(i, i)", id="bits of numbers"),
        pytest.param(
            "m = aten.unsqueeze(x, 0)\nn = aten.transpose.int(m, 1, 2)\no = aten.matmul(m, n)\n"
            "y = aten.baddbmm(o, m, n, beta=0.5)",
            id="half of the bias",
        ),
        pytest.param(
            "m = aten.unsqueeze(x, 0)\nn = aten.transpose.int(m, 1, 2)\no = aten.matmul(m, n)\n"
            "y = aten.baddbmm(o, m, n, alpha=0.5)",
            id="half of the product",
        ),
        pytest.param("y = aten.linalg_vector_norm(x, 0, [-1])", id="how many are not zero"),
        pytest.param("y = aten.linalg_vector_norm(x)", id="of all elements"),
        pytest.param("y = aten.linalg_vector_norm(x, 2, [-1], dtype=float64)", id="in another type"),
        pytest.param("y = aten.std.dim(x, [0])", id="over tokens, whose number isn't known"),
        pytest.param("y = aten.std.dim(x, None)", id="spread of all elements"),
        pytest.param("y = aten.sum.dim_IntList(x, [-1])", id="a sum in its own type"),
        pytest.param("y = aten.cat([x, x], 1)", id="parts of one type"),
        pytest.param("y = aten.index_put(x, [b], half, True)", id="a number that is added"),
        pytest.param("y = aten.index_put(x, [None, third], half)", id="one place of each row"),
        pytest.param("m = aten.select.int(b, 1, 0)\ny = aten.index_put(x, [m], half)", id="whole rows"),
        pytest.param("y = aten.where.ScalarOther(b, i, 0.5)", id="a number that widens"),
        pytest.param(f"{COLUMN}y = aten.where.ScalarOther(b, s, 0.5)", id="a condition that spreads"),
        pytest.param("y = aten.where.self(b, x, x)", id="two tensors"),
        pytest.param("y = aten.rms_norm(table, [50, 8])", id="over two dimensions"),
    ],
)
def test_near_another_spelling_of_arithmetic(body: str) -> None:
    assert_stays(normalise_arithmetic, body)


# --- copies of one part onto itself ------------------------------------------------------------------------------

FREQUENCIES = """
positions: input(int64, 1, T)
inv_freq: param(float32, 8)
apart: constant(float32, [[[0.0]], [[1.0]], [[2.0]]])
one = aten.to.dtype(positions, float32)
column = aten.unsqueeze(one, 2)
columns = aten.expand(column, [3, -1, -1])
freqs = aten.mul.Tensor(columns, inv_freq)
first = aten.select.int(freqs, 0, 0)
other = aten.select.int(freqs, 0, 1)
to = aten.slice.Tensor(first, 1, 1, 7, 3)
part = aten.slice.Tensor(other, 1, 1, 7, 3)
copied = aten.copy_(to, part)
y = aten.cos(first)
return y
"""


def frequencies(*edits: tuple[str, str]) -> str:
    """The text with edits, each of a part that is there once."""
    text = FREQUENCIES
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


COPY = "copied = aten.copy_(to, part)"


@pytest.mark.parametrize(
    "edits",
    [
        pytest.param((), id="the second copy"),
        pytest.param((("freqs, 0, 1", "freqs, 0, 0"),), id="the first, onto itself"),
        pytest.param(
            (
                ("columns, inv_freq)", "columns, inv_freq)\nfirst_of_all = aten.slice.Tensor(freqs, 0, 0, 2)"),
                ("aten.select.int(freqs, 0, 1)", "aten.select.int(first_of_all, 0, 1)"),
                ("aten.select.int(freqs, 0, 0)", "aten.select.int(first_of_all, 0, 0)"),
            ),
            id="of two of them",
        ),
        pytest.param(
            (
                (
                    "aten.expand(column, [3, -1, -1])",
                    "aten.expand(column, [3, -1, -1])\nrows = aten.unsqueeze(inv_freq, 0)\n"
                    "wide = aten.expand(rows, [3, 1, 8])",
                ),
                ("aten.mul.Tensor(columns, inv_freq)", "aten.matmul(columns, wide)"),
            ),
            id="of a product",
        ),
    ],
)
def test_a_part_of_equal_copies_is_copied_nowhere(edits: tuple[tuple[str, str], ...]) -> None:
    applied = apply(remove_self_copies, frequencies(*edits))

    assert applied.changed
    assert "aten.copy_" not in applied.text
    assert "aten.cos.default" in applied.text


def test_a_sum_is_written_once() -> None:
    """x[a:b] += y is a sum in place, and x[a:b] = x[a:b]."""
    applied = apply(
        remove_self_copies, frequencies((COPY, "more = aten.add_.Tensor(to, 1.0)\ncopied = aten.copy_(to, more)"))
    )

    assert "aten.add_.Tensor" in applied.text
    assert "aten.copy_" not in applied.text


@pytest.mark.parametrize(
    "edits",
    [
        pytest.param((("other, 1, 1, 7, 3", "other, 1, 2, 8, 3"),), id="another part"),
        pytest.param((("columns, inv_freq)", "columns, apart)"),), id="copies that differ"),
        pytest.param(
            (
                ("columns, inv_freq)", "columns, inv_freq)\nother_freqs = aten.mul.Tensor(freqs, 2.0)"),
                ("aten.select.int(freqs, 0, 1)", "aten.select.int(other_freqs, 0, 1)"),
            ),
            id="another tensor",
        ),
        pytest.param(
            (
                ("(column, [3, -1, -1])", "(column, [3, -1, -1])\nthree = aten.slice.Tensor(inv_freq, 0, 0, 3)"),
                ("columns, inv_freq)", "columns, three)"),
                (
                    "first = aten.select.int(freqs, 0, 0)",
                    "turned = aten.transpose.int(freqs, 0, 2)\nfirst = aten.select.int(turned, 0, 0)",
                ),
                ("aten.select.int(freqs, 0, 1)", "aten.select.int(turned, 0, 1)"),
                ("first, 1, 1, 7, 3", "first, 1, 0, 2"),
                ("other, 1, 1, 7, 3", "other, 1, 0, 2"),
            ),
            id="another dimension is the first",
        ),
        pytest.param(
            (
                ("columns, inv_freq)", "columns, inv_freq)\nrow = aten.select.int(freqs, -3, 2)"),
                ("first = aten.select.int(freqs, 0, 0)", "first = aten.select.int(row, 0, 0)"),
                ("aten.select.int(freqs, 0, 1)", "aten.select.int(row, 0, 1)"),
                ("first, 1, 1, 7, 3", "first, 0, 1, 7, 3"),
                ("other, 1, 1, 7, 3", "other, 0, 1, 7, 3"),
            ),
            id="the equal dimension is gone",
        ),
        pytest.param(((COPY, "more = aten.add_.Tensor(other, 1.0)\n" + COPY),), id="one was written before"),
    ],
)
def test_near_a_copy_of_equal_parts(edits: tuple[tuple[str, str], ...]) -> None:
    assert_leaves(remove_self_copies, frequencies(*edits))
