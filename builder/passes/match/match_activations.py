"""Finds activation functions that models write out."""

from __future__ import annotations

import math

import torch

from precast.builder.graph.context import FxNode, PassContext
from precast.builder.graph.match import Add, Capture, Mul, Op, match
from precast.builder.passes.graph_pass import node_pass

aten = torch.ops.aten

_X = Capture("x")
_CUBIC = Add(_X, Mul(Op(aten.pow.Tensor_Scalar, _X, 3.0), 0.044715))
_TANH_GELU = Mul(Mul(_X, 0.5), Add(Op(aten.tanh.default, Mul(_CUBIC, math.sqrt(2.0 / math.pi))), 1.0))


@node_pass(stage="match", version=1)
def match_activations(ctx: PassContext, node: FxNode) -> FxNode | None:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) -> gelu(x, approximate="tanh")."""
    found = match(_TANH_GELU, node)
    return ctx.call(aten.gelu.default, found["x"], approximate="tanh") if found else None
