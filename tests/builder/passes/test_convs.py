"""Convolutions that look back only, and their near misses."""

from __future__ import annotations

import pytest
import torch
from fx_text import _random_inputs, assert_leaves, compute, read_graph, write_graph

from precast.builder import pipeline
from precast.builder.passes.match.causal_conv import match_causal_conv

CONV = """
x: input({dtype}, 1, 6, 7)
w: param({dtype}, 6, 1, 4)
b: param({dtype}, 6)
cu_seqlens: input(int32, B1)
{body}
return y
"""
PADDED_BOTH_ENDS = "c = aten.conv1d.default(x, w, b, [1], [3], [1], 6)\ny = aten.slice.Tensor(c, 2, 0, -3)"
PADDED_BEFORE = "p = aten.pad.default(x, [3, 0])\ny = aten.conv1d.default(p, w, b, [1], [0], [1], 6)"
PADDED_WITH_ZEROS = (
    "p = aten.constant_pad_nd.default(x, [3, 0], 0.0)\ny = aten.conv1d.default(p, w, b, [1], [0], [1], 6)"
)
AFTER = """
v0 = aten.transpose.int(x, 1, 2)
v1 = aten.squeeze.dim(w, 1)
v2 = precast.causal_conv(v0, v1, b, cu_seqlens, activation=none)
v3 = aten.transpose.int(v2, 1, 2)
return v3
""".strip()


@pytest.mark.parametrize("body", [PADDED_BOTH_ENDS, PADDED_BEFORE, PADDED_WITH_ZEROS])
def test_a_conv_that_looks_back_only(body: str) -> None:
    source = read_graph(CONV.format(dtype="float32", body=body))
    inputs = _random_inputs(source) | {"cu_seqlens": torch.tensor([0, 7, 7], dtype=torch.int32)}
    (expected,) = compute(source, inputs)

    (record,) = pipeline.run(source.graph, source.ctx, (match_causal_conv,))

    assert record.changed
    assert write_graph(source.graph, source.ctx) == AFTER
    torch.testing.assert_close(compute(source, inputs)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("y = aten.conv1d.default(x, w, b, [1], [0], [1], 6)", id="no zeros before"),
        pytest.param("y = aten.conv1d.default(x, w, b, [1], [3], [1], 6)", id="all results"),
        pytest.param(PADDED_BOTH_ENDS.replace("0, -3", "3, 99"), id="the last results"),
        pytest.param(PADDED_BOTH_ENDS.replace("0, -3", "0, -4"), id="one result too few"),
        pytest.param(PADDED_BOTH_ENDS.replace("[1], 6", "[2], 6"), id="every second token"),
        pytest.param(PADDED_BEFORE.replace("[3, 0]", "[0, 3]"), id="zeros behind"),
        pytest.param(PADDED_BEFORE.replace("[3, 0]", "[2, 1]"), id="a token ahead"),
        pytest.param(PADDED_BEFORE.replace("[3, 0]", "[3, 0], 'replicate'"), id="no zeros"),
        pytest.param(PADDED_BEFORE.replace("[3, 0]", "[3, 0], 'constant', 1.0"), id="ones"),
        pytest.param(
            "p = aten.pad.default(x, [3, 0])\nr = aten.expand.default(w, [6, 6, 4])\n"
            "y = aten.conv1d.default(p, r, b, [1], [0], [1], 1)", id="channels are mixed",
        ),
    ],
)  # fmt: skip
def test_near_a_conv_that_looks_back_only(body: str) -> None:
    assert_leaves(match_causal_conv, CONV.format(dtype="float32", body=body))
