"""What depends on constants alone is computed while building; what might not is left."""

from __future__ import annotations

import pytest
import torch
from fx_text import apply, assert_leaves

from precast.builder.passes.normalise.fold_constants import MAX_ELEMENTS, fold_constants

INPUTS = "x: input(float32, 1, T, 4)\ncu_seqlens: input(int32, B1)\nc: constant(float32, [1.0, 2.0, 3.0, 4.0])\n"


def folded(body: str) -> tuple[str, dict[str, torch.Tensor]]:
    """The text behind the pass, and the constants that it made."""
    applied = apply(fold_constants, f"{INPUTS}{body}")
    made = {info.name: info.value for info in applied.ctx.constants.values() if info.name != "c"}
    return applied.text, made


def test_a_chain_of_constants_is_one_constant() -> None:
    text, made = folded(
        "half = aten.mul.Tensor(c, 0.5)\nsum = aten.add.Tensor(half, c)\ny = aten.add.Tensor(x, sum)\nreturn y"
    )

    assert text == "v0 = aten.add.Tensor(x, folded_1)\nreturn v0"
    assert made["folded_1"].tolist() == [1.5, 3.0, 4.5, 6.0]


def test_what_is_made_from_nothing_is_a_constant() -> None:
    text, made = folded(
        "at = aten.arange.default(4)\nwide = aten.to.dtype(at, float32)\ny = aten.add.Tensor(x, wide)\nreturn y"
    )

    assert text == "v0 = aten.add.Tensor(x, folded_0)\nreturn v0"
    assert made["folded_0"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_each_value_that_the_rest_of_the_graph_uses_is_a_constant() -> None:
    text, made = folded(
        "half = aten.mul.Tensor(c, 0.5)\nlog = aten.log(half)\na = aten.add.Tensor(x, half)\n"
        "b = aten.mul.Tensor(a, log)\nreturn b"
    )

    assert text == "v0 = aten.add.Tensor(x, folded_1)\nv1 = aten.mul.Tensor(v0, folded_2)\nreturn v1"
    assert torch.equal(made["folded_2"], made["folded_1"].log())


def test_a_constant_is_stored_as_it_is_read() -> None:
    _, made = folded(
        "wide = aten.expand(c, [3, 4])\nt = aten.transpose.int(wide, 0, 1)\ny = aten.matmul(x, t)\nreturn y"
    )

    assert made["folded_1"].shape == (4, 3)
    assert made["folded_1"].is_contiguous()


def test_a_constant_keeps_its_dtype() -> None:
    text, made = folded(
        "n = aten.to.dtype(c, bfloat16)\nm = aten.to.dtype(x, bfloat16)\ny = aten.mul.Tensor(m, n)\nreturn y"
    )

    assert made["folded_1"].dtype == torch.bfloat16
    assert text.splitlines()[0] == "v0 = aten.to.dtype(x, bfloat16)"


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("y = aten.add.Tensor(x, c)", id="an input is in it"),
        pytest.param("n = aten.rand([4])\nm = aten.mul.Tensor(n, 0.0)\ny = aten.add.Tensor(x, m)", id="it is random"),
        pytest.param(
            f"n = aten.full([{MAX_ELEMENTS // 4 + 1}, 4], 2.0)\nm = aten.select.int(n, 0, 0)\n"
            "y = aten.add.Tensor(x, m)",
            id="it is large",
        ),
        pytest.param(
            "t = aten.sym_size.int(x, 1)\nn = aten.full([t, 4], 2.0)\ny = aten.add.Tensor(x, n)",
            id="it has as many rows as there are tokens",
        ),
        pytest.param("n, i = aten.sort.default(c)\ny = aten.add.Tensor(x, n)", id="it is one of several results"),
    ],
)
def test_what_is_no_constant_stays(body: str) -> None:
    assert_leaves(fold_constants, f"{INPUTS}{body}\nreturn y")


def test_a_write_stays() -> None:
    text, _ = folded("n = aten.neg(c)\nm = aten.mul_.Tensor(n, 2.0)\ny = aten.add.Tensor(x, m)\nreturn y")

    assert text == "v0 = aten.mul_.Tensor(folded_1, 2.0)\nv1 = aten.add.Tensor(x, v0)\nreturn v1"


def test_params_are_no_constants() -> None:
    assert_leaves(
        fold_constants, f"{INPUTS}w: param(float32, 4)\ns = aten.mul.Tensor(w, c)\ny = aten.add.Tensor(x, s)\nreturn y"
    )


def test_as_many_elements_as_may_be() -> None:
    _, made = folded(
        f"n = aten.full([{MAX_ELEMENTS // 4}, 4], 2.0)\nm = aten.matmul(x, c)\ny = aten.add.Tensor(n, 1.0)\nreturn m, y"
    )

    assert made["folded_1"].numel() == MAX_ELEMENTS
