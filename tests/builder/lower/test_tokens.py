"""Ops that look across tokens without knowing sequences are refused; what treats each token by itself is not."""

from __future__ import annotations

import pytest
from fx_text import read_graph

from precast.builder.lower.tokens import refuse_mixed_tokens
from precast.ir.errors import BuildError

INPUTS = """
x: input(float32, 1, T, 8)
flat: input(float32, T, 8)
ids: input(int64, 1, T)
bounds: input(int32, B1)
rows: input(int64, T, 2)
ahead: input(int64, 2, 8)
w: param(float32, 8, 8)
prefix: param(float32, 1, 3, 8)
u: param(float32, 8)
t = aten.transpose.int(x, 1, 2)
"""
SCORES = "s = aten.matmul(x, t)\n"


def check(body: str) -> None:
    """Looks at a graph whose last line returns `y`."""
    source = read_graph(f"{INPUTS}{body}\nreturn y")
    refuse_mixed_tokens(source.graph, source.ctx)


@pytest.mark.parametrize(
    ("body", "op"),
    [
        pytest.param("y = aten.matmul(x, t)", "aten.matmul.default", id="scores of each token for each other"),
        pytest.param(
            "c = aten.unsqueeze(ids, 2)\nr = aten.unsqueeze(ids, 1)\ny = aten.sub.Tensor(c, r)",
            "aten.sub.Tensor",
            id="distances",
        ),
        pytest.param("y = aten.matmul(t, x)", "aten.matmul.default", id="a product over tokens"),
        pytest.param(
            "z = aten.select.int(t, 0, 0)\ny = aten.addmm(u, z, flat)",
            "aten.addmm.default",
            id="a sum and a product over tokens",
        ),
        pytest.param(
            "z = aten.expand(t, [8, 8, -1])\nk = aten.select.int(t, 0, 0)\ny = aten.linear(z, k)",
            "aten.linear.default",
            id="weights of tokens",
        ),
        pytest.param("y = aten.mean.dim(x, [1])", "aten.mean.dim", id="mean"),
        pytest.param("y = aten.sum.dim_IntList(x, [-2], True)", "aten.sum.dim_IntList", id="sum"),
        pytest.param("y = aten.sum.dim_IntList(x, [0, 1])", "aten.sum.dim_IntList", id="sum over two dimensions"),
        pytest.param("y = aten.sum.dim_IntList(x, None)", "aten.sum.dim_IntList", id="sum of all"),
        pytest.param("y = aten.softmax.int(x, 1)", "aten.softmax.int", id="softmax"),
        pytest.param("y = aten.cumsum(x, 1)", "aten.cumsum.default", id="running sum"),
        pytest.param("y, i = aten.topk.default(t, 2)", "aten.topk.default", id="the largest, of the last dimension"),
        pytest.param("y, i = aten.topk.default(x, 2, 1)", "aten.topk.default", id="the largest"),
        pytest.param("y, i = aten.sort.default(t)", "aten.sort.default", id="sorted, by the last dimension"),
        pytest.param("y, i = aten.sort.default(x, 1)", "aten.sort.default", id="sorted"),
        pytest.param("y, i = aten.max.dim(x, 1)", "aten.max.dim", id="the largest and where it is"),
        pytest.param("y = aten.argmax(x, 1)", "aten.argmax.default", id="where the largest is"),
        pytest.param("y = aten.argmax(x)", "aten.argmax.default", id="where the largest of all is"),
        pytest.param("y = aten.amax(x, [1])", "aten.amax.default", id="the largest value"),
        pytest.param("z = aten.gt.Scalar(x, 0)\ny = aten.any.dim(z, 1)", "aten.any.dim", id="any"),
        pytest.param("y = aten.gather(flat, 0, ahead)", "aten.gather.default", id="rows of other tokens"),
        pytest.param("y = aten.scatter.value(flat, 0, ahead, 1.0)", "aten.scatter.value", id="a number for others"),
        pytest.param("y = aten.scatter.src(flat, 0, ahead, w)", "aten.scatter.src", id="values for others"),
        pytest.param(
            "z = aten.select.int(ahead, 0, 0)\ny = aten.index_select(x, 1, z)",
            "aten.index_select.default",
            id="selected tokens",
        ),
        pytest.param("y = aten.cat([x, x], 1)", "aten.cat.default", id="tokens twice"),
        pytest.param("y = aten.cat([flat, flat])", "aten.cat.default", id="tokens twice, along the first dimension"),
        pytest.param("y = aten.cat([prefix, x], 1)", "aten.cat.default", id="learned tokens before"),
        pytest.param("y = aten.slice.Tensor(x, 1, -1)", "aten.slice.Tensor", id="the last token"),
        pytest.param(
            "y = aten.slice.Tensor(x, 1, 1, 9223372036854775807)", "aten.slice.Tensor", id="all but the first"
        ),
        pytest.param("y = aten.select.int(x, 1, 0)", "aten.select.int", id="the first token"),
        pytest.param("y = aten.reshape(x, [1, 8, -1])", "aten.reshape.default", id="other features of a token"),
        pytest.param("y = aten.reshape(t, [1, -1])", "aten.reshape.default", id="all in a row"),
        pytest.param("y = aten.reshape(t, [-1, 8])", "aten.reshape.default", id="tokens and features exchanged"),
        pytest.param("y = aten.embedding(flat, ids)", "aten.embedding.default", id="a table of tokens"),
        pytest.param("y = precast.embedding(ids, flat)", "precast.embedding", id="a table of tokens, ours"),
        pytest.param(
            "y = precast.rms_norm(t, None, eps=0.001, cast_before_scale=False)", "precast.rms_norm", id="norm"
        ),
        pytest.param("y = precast.layer_norm(t, None, None, eps=0.001)", "precast.layer_norm", id="another norm"),
        pytest.param(
            "d = aten.cat([t, t], 2)\ny = precast.gated_activation(d, kind='silu')",
            "precast.gated_activation",
            id="gates of other tokens",
        ),
        pytest.param("n = aten.sym_size.int(x, 1)\ny = aten.div.Tensor(x, n)", "aten.div.Tensor", id="their number"),
        pytest.param(
            "n = aten.sym_size.int(x, 1)\ny = aten.rsub.Scalar(ids, n)", "aten.rsub.Scalar", id="how many are to come"
        ),
        pytest.param("n = aten.sym_size.int(x, 1)\ny = aten.clamp(x, None, n)", "aten.clamp.default", id="no more"),
        pytest.param(
            "n = aten.sym_size.int(x, 1)\ny = aten.full_like(x, fill_value=n)", "aten.full_like.default", id="named"
        ),
    ],
)
def test_a_look_across_tokens_is_refused(body: str, op: str) -> None:
    with pytest.raises(BuildError, match="looks across tokens") as error:
        check(body)

    assert error.value.code == "feature-unsupported"
    assert f"{op} (in the model itself)" in error.value.message


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("y = aten.linear(x, w, u)", id="a linear layer"),
        pytest.param("z = aten.select.int(x, 0, 0)\ny = aten.addmm(u, z, w)", id="a product and a sum"),
        pytest.param(
            "h = aten.reshape(x, [-1, 2, 4])\nk = aten.transpose.int(h, 1, 2)\ny = aten.matmul(h, k)",
            id="products of one token's heads",
        ),
        pytest.param("y = aten.mean.dim(x, [-1], True)", id="mean of a token's features"),
        pytest.param("y = aten.sum.dim_IntList(t, [1])", id="sum of a token's features"),
        pytest.param("y = aten.softmax.int(x, -1)", id="softmax of a token"),
        pytest.param("y = aten.cumsum(x, 2)", id="running sum of a token's features"),
        pytest.param("y, i = aten.topk.default(x, 2)", id="a token's largest"),
        pytest.param("y, i = aten.sort.default(x)", id="a token's features, sorted"),
        pytest.param("y, i = aten.max.dim(flat, 1)", id="a token's largest and where it is"),
        pytest.param("y = aten.argmax(flat, -1)", id="where a token's largest is"),
        pytest.param("y = aten.gather(flat, 1, rows)", id="a token's features by index"),
        pytest.param("y = aten.scatter.value(flat, 1, rows, 1.0)", id="a number for some of a token's features"),
        pytest.param("y = aten.cat([x, x], -1)", id="features twice"),
        pytest.param("y = aten.cat([x, x])", id="a dimension of copies"),
        pytest.param("y = aten.slice.Tensor(x, 2, 0, 4)", id="half of the features"),
        pytest.param("y = aten.slice.Tensor(x, 1, 0, 9223372036854775807)", id="all tokens"),
        pytest.param("y = aten.select.int(x, 2, 0)", id="one feature"),
        pytest.param("y = aten.reshape(x, [1, -1, 2, 4])", id="heads"),
        pytest.param("y = aten.reshape(x, [-1, 8])", id="without the first dimension"),
        pytest.param(
            "h = aten.reshape(x, [1, -1, 2, 4])\nk = aten.transpose.int(h, 1, 2)\ny = aten.reshape(k, [2, -1, 4])",
            id="heads first, without the first dimension",
        ),
        pytest.param("y = precast.embedding(ids, w)", id="a table, ours"),
        pytest.param("y = precast.rms_norm(x, u, eps=0.001, cast_before_scale=False)", id="norm of a token"),
        pytest.param("y = precast.attention(q, q, q, None, bounds, scale=0.5)", id="attention"),
        pytest.param("y = precast.causal_conv(x, w, None, bounds)", id="a conv of ours"),
        pytest.param("y = precast.gather_rows(x, i)", id="wanted rows"),
        pytest.param("z = aten.softmax.int(w, 0)\ny = aten.linear(x, z)", id="what has no tokens"),
        pytest.param(
            "n = aten.sym_size.int(x, 1)\ne = aten.expand(u, [1, n, 8])\ny = aten.add.Tensor(x, e)",
            id="the same for each token",
        ),
        pytest.param("n = aten.sym_size.int(x, 2)\ny = aten.div.Tensor(x, n)", id="the number of a token's features"),
    ],
)
def test_what_treats_each_token_by_itself_is_allowed(body: str) -> None:
    heads = "q = aten.reshape(x, [1, -1, 2, 4])\n" if "(q, q, q" in body else ""
    wanted = "i = aten.select.int(rows, 1, 0)\n" if "(x, i)" in body else ""
    check(heads + wanted + body)


@pytest.mark.parametrize(
    ("body", "op"),
    [
        pytest.param("y = aten.erf(x)", "aten.erf.default", id="of single elements, which nobody said"),
        pytest.param("y = aten.flip(x, [1])", "aten.flip.default", id="of tokens in another order"),
    ],
)
def test_an_op_without_a_row_is_refused(body: str, op: str) -> None:
    with pytest.raises(BuildError, match="looks across tokens") as error:
        check(body)

    assert op in error.value.message


def test_an_op_without_a_row_may_do_what_it_likes_to_weights() -> None:
    check("z = aten.flip(w, [1])\ny = aten.linear(x, z)")


def test_all_are_named_at_once_with_their_layers() -> None:
    layers = "".join(
        f'with layer("model.layers.{n}.mixer"):\n    a{n} = aten.cumsum(x, 1)\n    b{n} = aten.mean.dim(a{n}, [1])\n'
        for n in range(4)
    )

    with pytest.raises(BuildError) as error:
        check(f"{layers}with layer('norm'):\n    c = aten.cumsum(x, 2)\ny = aten.add.Tensor(a0, b0)")

    names = "layers.0.mixer, layers.1.mixer, layers.2.mixer and 1 more"
    assert f"aten.cumsum.default (in {names}); aten.mean.dim (in {names})" in error.value.message
