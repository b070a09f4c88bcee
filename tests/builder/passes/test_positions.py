"""Positions that a model counts itself: those of its tokens, where each number says something of its token alone."""

from __future__ import annotations

import pytest
from fx_text import apply, assert_leaves, assert_rewrites, read_graph

from precast.builder import pipeline
from precast.builder.lower.tokens import refuse_mixed_tokens
from precast.builder.passes.normalise.positions import match_positions
from precast.ir.errors import BuildError

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


def test_numbers_of_tokens_that_scale_what_belongs_to_them() -> None:
    assert_rewrites(
        match_positions,
        f"""{INPUTS}
h = aten.view(x, [1, n, 2, 3])
at = aten.arange(n)
near = aten.to.dtype(at, float32)
later = aten.add.Tensor(near, 1.0)
steps = aten.div.Tensor(later, 3)
whole = aten.floor(steps)
grown = aten.log1p(whole)
scale = aten.view(grown, [1, n, 1, 1])
y = aten.mul.Tensor(h, scale)
return y
""",
        """
v0 = aten.sym_size.int(input_ids, 1)
v1 = aten.view.default(x, [1, v0, 2, 3])
v2 = aten.select.int(positions, 0, 0)
v3 = aten.to.dtype(v2, float32)
v4 = aten.add.Tensor(v3, 1.0)
v5 = aten.div.Tensor(v4, 3)
v6 = aten.floor.default(v5)
v7 = aten.log1p.default(v6)
v8 = aten.view.default(v7, [1, v0, 1, 1])
v9 = aten.mul.Tensor(v1, v8)
return v9
""",
    )


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(
            "r = aten.embedding(w, at)\nf = aten.to.dtype(at, float32)\nc = aten.unsqueeze(f, 1)\n"
            "y = aten.mul.Tensor(r, c)",
            id="used twice",
        ),
        pytest.param("s = aten.minimum(at, input_ids)\ny = aten.embedding(w, s)", id="moved by tokens"),
        pytest.param("d = aten.mul.Tensor(at, 2)\ny = aten.embedding(w, d)", id="another number"),
        pytest.param("c = aten.unsqueeze(at, 1)\ny = aten.mul.Tensor(x, c)", id="a token's own values"),
    ],
)
def test_numbers_of_tokens_by_which_each_is_told_apart(body: str) -> None:
    applied = apply(match_positions, f"{INPUTS}at = aten.arange(n)\n{body}\nreturn y\n")

    assert applied.changed
    assert "aten.select.int(positions, 0, 0)" in applied.text
    assert "arange" not in applied.text


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("at = aten.arange(n)\ny = aten.embedding(x, at)", id="rows of the tokens, no table"),
        pytest.param("at = aten.arange(n)\nh = aten.clamp(at, 2)\ny = aten.embedding(x, h)", id="rows of other tokens"),
        pytest.param("at = aten.arange(n)\ny = aten.index.Tensor(x, [at])", id="an index"),
        pytest.param("at = aten.arange(n)\ny = aten.index_select(x, 0, at)", id="another index"),
        pytest.param("at = aten.arange(n)\ny = aten.add.Tensor(at, input_ids)", id="nothing but numbers"),
        pytest.param("at = aten.arange(5)\ny = aten.embedding(w, at)", id="not as many as tokens"),
        pytest.param("m = aten.arange.start(1, n)\ny = aten.embedding(w, m)", id="from the second token on"),
        pytest.param(
            "at = aten.arange(n)\nleft = aten.rsub.Scalar(at, n)\nc = aten.unsqueeze(left, 1)\n"
            "y = aten.mul.Tensor(x, c)",
            id="how many are to come",
        ),
        pytest.param(
            "at = aten.arange(n)\npart = aten.div.Tensor(at, n)\nc = aten.unsqueeze(part, 1)\n"
            "y = aten.mul.Tensor(x, c)",
            id="which part of the sequence",
        ),
        pytest.param(
            "at = aten.arange(n)\nf = aten.to.dtype(at, float32)\nc = aten.unsqueeze(f, 1)\n"
            "d = aten.sub.Tensor(c, f)\ny = aten.mul.Tensor(d, 0.5)",
            id="how far two are apart",
        ),
        pytest.param(
            "at = aten.arange(n)\nc = aten.unsqueeze(at, 1)\nd = aten.maximum(c, at)\ny = aten.embedding(w, d)",
            id="rows by two tokens",
        ),
        pytest.param(
            "at = aten.arange(n)\nf = aten.to.dtype(at, float32)\nm = aten.amax(f, [0])\ny = aten.mul.Tensor(x, m)",
            id="the last of them",
        ),
        pytest.param(
            "at = aten.arange(n)\ns = aten.flip(at, [0])\nc = aten.unsqueeze(s, 1)\ny = aten.mul.Tensor(x, c)",
            id="backwards",
        ),
    ],
)
def test_anything_else_is_left(body: str) -> None:
    assert_leaves(match_positions, f"{INPUTS}{body}\nreturn y\n")


def test_rows_of_tokens_by_what_was_counted_are_refused() -> None:
    source = read_graph(f"""{INPUTS}
at = aten.arange(n)
scaled = aten.mul.Tensor(at, 0.5)
c = aten.unsqueeze(scaled, 1)
h = aten.mul.Tensor(x, c)
i = aten.to.dtype(scaled, int64)
y = aten.embedding(h, i)
return y
""")

    pipeline.run(source.graph, source.ctx, (match_positions,))

    with pytest.raises(BuildError, match=r"looks across tokens .*aten\.embedding"):
        refuse_mixed_tokens(source.graph, source.ctx)
