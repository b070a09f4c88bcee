"""Padding masks that a model makes for itself: those that mask nothing go, others are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from fx_text import SmallGraph, read_graph, write_graph
from transformers import AutoConfig

from precast.builder.build import build
from precast.builder.capture.capture import _drop_paddings
from precast.builder.source.shrink import shrink
from precast.ir.errors import BuildError

INPUTS = """
input_ids: input(int64, 1, T)
positions: input(int64, 1, T)
x: input(float32, 1, T, 8)
y = aten.exp(x)
"""
VOCAB = 3000


def masked(*bodies: str) -> SmallGraph:
    """A graph with the logits `y` and the mask `m` of each body as further outputs."""
    calls = "".join(f"{body}\nm{n} = aten.to.dtype(m, float32)\n" for n, body in enumerate(bodies))
    names = "".join(f", m{n}" for n in range(len(bodies)))
    source = read_graph(f"{INPUTS}{calls}return y{names}" if names else f"{INPUTS}return y")
    (output,) = [node for node in source.graph.nodes if node.op == "output"]
    logits, *masks = output.args[0].values()
    output.args = ({"logits": logits} | {f"padding_{n}": mask for n, mask in enumerate(masks)},)
    return source


@pytest.mark.parametrize(
    "bodies",
    [
        pytest.param((), id="no mask"),
        pytest.param(("m = aten.ones_like(input_ids)",), id="ones"),
        pytest.param(("m = aten.ge.Scalar(positions, 0)",), id="of the positions"),
        pytest.param(("m = aten.ge.Scalar(input_ids, 0)",), id="true for every token"),
        pytest.param((f"m = aten.lt.Scalar(input_ids, {VOCAB})",), id="true for every token that there is"),
        pytest.param(("m = aten.ones_like(input_ids)", "m = aten.ge.Scalar(positions, 0)"), id="two"),
    ],
)
def test_masks_that_mask_nothing_go(bodies: tuple[str, ...]) -> None:
    source = masked(*bodies)

    _drop_paddings(source.graph, source.ctx, VOCAB)

    assert write_graph(source.graph, source.ctx).splitlines()[-1] == "return v0"


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("m = aten.ne.Scalar(input_ids, 0)", id="the first token"),
        pytest.param("m = aten.ne.Scalar(input_ids, 1500)", id="a token in the middle"),
        pytest.param(f"m = aten.ne.Scalar(input_ids, {VOCAB - 1})", id="the last token"),
        pytest.param("m = aten.zeros_like(input_ids)", id="everything"),
        pytest.param("m = aten.lt.Scalar(positions, 9)", id="what is far"),
        pytest.param("a = aten.select.int(x, 2, 0)\nm = aten.isfinite(a)", id="what is known at run time alone"),
    ],
)
def test_masks_that_may_mask_a_token_are_refused(body: str) -> None:
    source = masked("m = aten.ones_like(input_ids)", body)

    with pytest.raises(BuildError, match="makes a padding mask from the tokens' values") as error:
        _drop_paddings(source.graph, source.ctx, VOCAB)

    assert error.value.code == "feature-unsupported"


def test_equal_constants_are_one(tmp_path: Path) -> None:
    """Each layer of Falcon H1 has a copy of one table."""
    config = shrink(AutoConfig.for_model("falcon_h1"))
    assert config.num_hidden_layers > 1

    bundle = build(config, tmp_path / "falcon.bundle", dtype="float32")

    assert sorted(constant.name.rpartition(".")[2] for constant in bundle.graph.constants) == ["inv_freq", "mup_vector"]
