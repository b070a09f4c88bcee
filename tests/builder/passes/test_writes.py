"""Writes into tensors: what becomes a new tensor, and what stays a write because another name shows it."""

from __future__ import annotations

import pytest
from fx_text import apply, assert_leaves, assert_rewrites

from precast.builder.passes.normalise.writes import remove_writes


def test_later_uses_are_of_the_result() -> None:
    assert_rewrites(
        remove_writes,
        """
        x: input(float32, T, 8)
        y = aten.exp(x)
        before = aten.neg(y)
        z = aten.div_.Tensor(y, 2.0)
        after = aten.add.Tensor(y, z)
        return before, after
        """,
        """
        v0 = aten.exp.default(x)
        v1 = aten.neg.default(v0)
        v2 = aten.div.Tensor(v0, 2.0)
        v3 = aten.add.Tensor(v2, v2)
        return v1, v3
        """,
    )


def test_a_write_whose_result_is_not_used() -> None:
    assert_rewrites(
        remove_writes,
        """
        x: input(float32, T, 8)
        i: input(int64, T, 2)
        y = aten.exp(x)
        aten.scatter_.value(y, 1, i, 1.0)
        z = aten.neg(y)
        return z
        """,
        """
        v0 = aten.exp.default(x)
        v1 = aten.scatter.value(v0, 1, i, 1.0)
        v2 = aten.neg.default(v1)
        return v2
        """,
    )


def test_the_written_tensor_keeps_its_dtype() -> None:
    applied = apply(
        remove_writes,
        """
        x: input(bfloat16, T, 8)
        w: input(float32, T, 8)
        y = aten.neg(x)
        z = aten.mul_.Tensor(y, w)
        return z
        """,
    )

    assert "v2 = aten.to.dtype(v1, bfloat16)" in applied.text


def test_one_write_behind_the_other() -> None:
    applied = apply(
        remove_writes,
        """
        x: input(float32, T, 8)
        y = aten.neg(x)
        a = aten.mul_.Tensor(y, 3.0)
        b = aten.add_.Tensor(a, x)
        z = aten.sub.Tensor(y, b)
        return z
        """,
    )

    assert "_." not in applied.text


def test_a_view_that_nothing_else_reads_may_be_written() -> None:
    applied = apply(
        remove_writes,
        """
        x: input(float32, T, 8)
        y = aten.neg(x)
        v = aten.view(y, [-1, 4])
        z = aten.mul_.Tensor(v, 3.0)
        return z
        """,
    )

    assert "aten.mul.Tensor" in applied.text


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("y = aten.view(x, [-1, 4])\nz = aten.mul_.Tensor(y, 3.0)", id="a view of an input"),
        pytest.param("z = aten.mul_.Tensor(x, 3.0)", id="an input"),
        pytest.param(
            "n = aten.neg(x)\ny = aten.view(n, [-1, 4])\na = aten.mul_.Tensor(y, 3.0)\nz = aten.exp(n)",
            id="a view of what is read behind",
        ),
        pytest.param(
            "n = aten.neg(x)\ny = aten.slice.Tensor(n, 1, 0, 4)\na = aten.mul_.Tensor(n, 3.0)\nz = aten.exp(y)",
            id="what a view of is read behind",
        ),
        pytest.param(
            "n = aten.neg(x)\ny = aten.dropout(n, 0.5, False)\na = aten.mul_.Tensor(y, 3.0)\nz = aten.exp(n)",
            id="what dropout has left as it is",
        ),
        pytest.param(
            "n = aten.neg(x)\na, b = aten.split.Tensor(n, 4, 1)\nc = aten.mul_.Tensor(a, 3.0)\nz = aten.exp(n)",
            id="a part of what is read behind",
        ),
    ],
)
def test_writes_that_another_name_shows_stay(body: str) -> None:
    assert_leaves(remove_writes, f"x: input(float32, T, 8)\n{body}\nreturn z\n")
