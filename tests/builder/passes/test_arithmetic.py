"""Rarely used arithmetic, spelled with the op table's."""

from __future__ import annotations

import pytest
from fx_text import assert_leaves, assert_rewrites

from precast.builder.passes.normalise.arithmetic import normalise_arithmetic


def test_a_batch_of_products_and_a_bias() -> None:
    assert_rewrites(
        normalise_arithmetic,
        """
        b: param(float32, 3, 1, 4)
        x: input(float32, 3, 7, 5)
        w: param(float32, 3, 5, 4)
        y = aten.baddbmm.default(b, x, w)
        return y
        """,
        """
        v0 = aten.matmul.default(x, w)
        v1 = aten.add.Tensor(v0, b)
        return v1
        """,
    )


@pytest.mark.parametrize("factor", ["beta=2", "alpha=0.5"])
def test_products_with_factors_stay(factor: str) -> None:
    assert_leaves(
        normalise_arithmetic,
        f"""
        b: param(float32, 3, 1, 4)
        x: input(float32, 3, 7, 5)
        w: param(float32, 3, 5, 4)
        y = aten.baddbmm.default(b, x, w, {factor})
        return y
        """,
    )


def test_a_length_is_the_root_of_a_sum_of_squares() -> None:
    assert_rewrites(
        normalise_arithmetic,
        """
        x: input(float32, 1, T, 8)
        n = aten.linalg_vector_norm.default(x, 2, [-1], True)
        y = aten.reciprocal.default(n)
        return y
        """,
        """
        v0 = aten.mul.Tensor(x, x)
        v1 = aten.sum.dim_IntList(v0, [-1], True)
        v2 = aten.sqrt.default(v1)
        v3 = aten.pow.Tensor_Scalar(v2, -1.0)
        return v3
        """,
    )


def test_a_length_in_half_precision_is_computed_in_float32() -> None:
    assert_rewrites(
        normalise_arithmetic,
        """
        x: input(bfloat16, 1, T, 8)
        y = aten.linalg_vector_norm.default(x, 2, [-1])
        return y
        """,
        """
        v0 = aten.to.dtype(x, float32)
        v1 = aten.mul.Tensor(v0, v0)
        v2 = aten.sum.dim_IntList(v1, [-1], False)
        v3 = aten.sqrt.default(v2)
        v4 = aten.to.dtype(v3, bfloat16)
        return v4
        """,
    )


@pytest.mark.parametrize(
    ("order", "after"),
    [
        ("1.0", "v1 = aten.sum.dim_IntList(v0, [-1], True)\nreturn v1"),
        (
            "4.0",
            "v1 = aten.pow.Tensor_Scalar(v0, 4.0)\nv2 = aten.sum.dim_IntList(v1, [-1], True)\n"
            "v3 = aten.pow.Tensor_Scalar(v2, 0.25)\nreturn v3",
        ),
    ],
)
def test_a_length_of_another_order(order: str, after: str) -> None:
    assert_rewrites(
        normalise_arithmetic,
        f"""
        x: input(float32, 1, T, 8)
        y = aten.linalg_vector_norm.default(x, {order}, [-1], True)
        return y
        """,
        f"v0 = aten.abs.default(x)\n{after}",
    )


@pytest.mark.parametrize("arguments", ["0, [-1]", "-1.0, [-1]", "1, None", "2"])
def test_other_lengths_stay(arguments: str) -> None:
    assert_leaves(
        normalise_arithmetic,
        f"""
        x: input(float32, 1, T, 8)
        y = aten.linalg_vector_norm.default(x, {arguments})
        return y
        """,
    )


@pytest.mark.parametrize(("op", "root"), [("std", True), ("var", False)])
def test_a_variance_is_a_mean_of_squared_distances(op: str, root: bool) -> None:
    after = """
        v0 = aten.mean.dim(x, [-1], True)
        v1 = aten.sub.Tensor(x, v0)
        v2 = aten.mul.Tensor(v1, v1)
        v3 = aten.sum.dim_IntList(v2, [-1], True)
        v4 = aten.div.Tensor(v3, 7)
        """
    assert_rewrites(
        normalise_arithmetic,
        f"""
        x: input(float32, 1, T, 8)
        y = aten.{op}.dim(x, [-1], True, True)
        return y
        """,
        after + ("v5 = aten.sqrt.default(v4)\n        return v5" if root else "return v4"),
    )
