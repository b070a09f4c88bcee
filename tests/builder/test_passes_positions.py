"""Positions that a model counts itself: those of its tokens, where they find rows of a table and do nothing else."""

from __future__ import annotations

import pytest
from fx_text import assert_leaves, assert_rewrites

from precast.builder.passes.match_positions import match_positions

INPUTS = """
input_ids: input(int64, 1, T)
positions: input(int64, 1, T)
x: input(float32, T, 6)
w: param(float32, 20, 6)
n = aten.sym_size.int(input_ids, 1)
"""


def test_numbers_of_tokens_that_look_up_a_table() -> None:
    assert_rewrites(
        match_positions,
        f"""{INPUTS}
at = aten.arange.start(0, n)
row = aten.expand(at, [1, -1])
moved = aten.add.Tensor(row, 2)
y = aten.embedding(w, moved)
z = aten.embedding(w, at)
return y, z
""",
        """
v0 = aten.select.int(positions, 0, 0)
v1 = aten.expand.default(v0, [1, -1])
v2 = aten.add.Tensor(v1, 2)
v3 = aten.embedding.default(w, v2)
v4 = aten.embedding.default(w, v0)
return v3, v4
""",
    )


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("at = aten.arange(n)\ny = aten.embedding(x, at)", id="rows of the tokens, no table"),
        pytest.param(
            "at = aten.arange(n)\nr = aten.embedding(w, at)\nc = aten.unsqueeze(at, 1)\ny = aten.mul.Tensor(r, c)",
            id="used twice",
        ),
        pytest.param("at = aten.arange(n)\ny = aten.add.Tensor(at, input_ids)", id="no lookup"),
        pytest.param("at = aten.arange(5)\ny = aten.embedding(w, at)", id="not as many as tokens"),
        pytest.param("m = aten.arange.start(1, n)\ny = aten.embedding(w, m)", id="from the second token on"),
        pytest.param(
            "at = aten.arange(n)\ns = aten.add.Tensor(at, input_ids)\ny = aten.embedding(w, s)", id="moved by tokens"
        ),
        pytest.param("at = aten.arange(n)\nd = aten.mul.Tensor(at, 2)\ny = aten.embedding(w, d)", id="another number"),
    ],
)
def test_anything_else_is_left(body: str) -> None:
    assert_leaves(match_positions, f"{INPUTS}{body}\nreturn y\n")
