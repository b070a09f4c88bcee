"""Finds short causal convolutions that a model writes with `conv1d`: each channel by itself, looking back only.

They look back because the input has K - 1 zeros before it, and of the results no more are kept than there are tokens.
The zeros are what `precast.causal_conv` sees before a sequence's first token.
"""

from __future__ import annotations

from typing import Any

import torch

from precast.builder.graph.context import FxGraph, FxNode, PassContext, tensor
from precast.builder.graph.nodes import argument, placeholder
from precast.builder.passes.graph_pass import graph_pass

aten = torch.ops.aten


@graph_pass(stage="match", version=1)
def match_causal_conv(graph: FxGraph, ctx: PassContext) -> bool:
    """conv1d(x, weight, padding=K - 1)[..., :T], conv1d(pad(x, (K - 1, 0)), weight) -> causal_conv(x, weight).

    Legal for as many groups as channels, with stride and dilation of 1.
    """
    changed = False
    cu_seqlens = placeholder(graph, "cu_seqlens")
    for node in list(graph.nodes):
        if node.target is not aten.conv1d.default or not _is_depthwise(node):
            continue
        for x, out in _causal(node):
            _replace(ctx, node, x, out, cu_seqlens)
            changed = True
    return changed


def _is_depthwise(conv: FxNode) -> bool:
    stride, dilation, groups = (_one(conv, name) for name in ("stride", "dilation", "groups"))
    shape = tensor(conv.args[0]).shape
    channels, inner, _ = tensor(conv.args[1]).shape
    return len(shape) == 3 and shape[0] == 1 and stride == dilation == 1 and inner == 1 and groups == channels


def _one(conv: FxNode, name: str) -> Any:
    """An argument of the one spatial dimension, which may stand in a list."""
    value = argument(conv, name)
    return value[0] if isinstance(value, (list, tuple)) else value


def _causal(conv: FxNode) -> list[tuple[FxNode, FxNode]]:
    """(what is convolved, its results for each token), for each use of the conv that looks back only."""
    back = int(tensor(conv.args[1]).shape[2]) - 1
    x, padding = conv.args[0], _one(conv, "padding")
    if padding == 0 and back > 0:
        return [(x.args[0], conv)] if _is_padded_by(x, back) else []
    if padding != back:
        return []
    if back == 0:
        return [(x, conv)]
    return [(x, user) for user in conv.users if _keeps_first(user, tensor(x).shape[2])]


def _is_padded_by(node: FxNode, back: int) -> bool:
    if node.target not in (aten.pad.default, aten.constant_pad_nd.default) or list(node.args[1]) != [back, 0]:
        return False
    mode = "constant" if node.target is aten.constant_pad_nd.default else argument(node, "mode")
    return mode == "constant" and argument(node, "value") in (None, 0)


def _keeps_first(node: FxNode, tokens: torch.SymInt | int) -> bool:
    """Whether the node takes the first `tokens` results."""
    if node.target is not aten.slice.Tensor or node.args[1] not in (2, -1):
        return False
    is_first = argument(node, "start") in (0, None) and argument(node, "step") == 1
    return is_first and bool(tensor(node).shape[2] == tokens)


def _replace(ctx: PassContext, conv: FxNode, x: FxNode, out: FxNode, cu_seqlens: FxNode) -> None:
    with ctx.before(out):
        rows = ctx.call(aten.transpose.int, x, 1, 2)
        weight, bias = _taps(ctx, conv.args[1]), argument(conv, "bias")
        y = ctx.call(torch.ops.precast.causal_conv.default, rows, weight, bias, cu_seqlens, activation="none")
        y = ctx.call(aten.transpose.int, y, 1, 2)
    ctx.replace(out, y)


def _taps(ctx: PassContext, weight: FxNode) -> FxNode:
    """`[C, 1, K]` as `[C, K]`."""
    if weight.target is aten.unsqueeze.default and weight.args[1] in (1, -2):
        return weight.args[0]
    return ctx.call(aten.squeeze.dim, weight, 1)
