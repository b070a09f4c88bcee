"""Finds rotations of pairs that are taken apart first, as DeepSeek-V3 and its relatives write them."""

from __future__ import annotations

from typing import Any

import torch

from precast.builder.graph.context import FxNode, PassContext, tensor
from precast.builder.graph.match import Add, Bindings, Capture, Either, Mul, Number, Op, match
from precast.builder.passes.graph_pass import node_pass
from precast.builder.passes.match.match_rotary import rotated

aten = torch.ops.aten


def _table(name: str) -> Any:
    """The table itself, cut from one that holds it twice, with a dimension for the heads."""
    half = Capture(name)
    cut = Op(aten.slice.Tensor, Op(aten.cat.default, [half, half], 2), 2, 0, Number("pairs"), 1)
    return Op(aten.unsqueeze.default, Either(cut, half), Number("heads_dim"))


_A, _B = Capture("a"), Capture("b")
_ROTATION = Op(
    aten.cat.default,
    [
        Op(aten.sub.Tensor, Mul(_A, _table("cos")), Mul(_B, _table("sin"))),
        Add(Mul(_B, _table("cos")), Mul(_A, _table("sin"))),
    ],
    3,
)


@node_pass(stage="match", version=1, requires=("match_rotary_tables",))
def match_paired_rotary(ctx: PassContext, node: FxNode) -> FxNode | None:
    """cat(a * cos - b * sin, b * cos + a * sin) -> rotary(cat(a, b), cos, sin), with the heads after the tokens.

    `a` and `b` are the even and the odd elements of a head, or any others: their halves are not put back in pairs.
    """
    found = match(_ROTATION, node) if node.target is aten.cat.default else None
    if found is None or not _is_rotation(node, found, ctx):
        return None
    x = ctx.call(aten.cat.default, [found["a"], found["b"]], 3)
    return rotated(ctx, x, found["cos"], found["sin"], heads_dim=found["heads_dim"], interleaved=False)


def _is_rotation(node: FxNode, found: Bindings, ctx: PassContext) -> bool:
    """Whether halves of heads of one size and type are turned by whole tables that have a row for each token."""
    if not all(isinstance(found[name], FxNode) for name in ("a", "b", "cos", "sin")):
        return False
    a, b, cos, sin = (tensor(found[name]) for name in ("a", "b", "cos", "sin"))
    if a.dim() != 4 or cos.dim() != 3 or found["heads_dim"] not in (1, 2):
        return False
    sizes = ctx.shape(a)
    tokens, pairs = sizes[2 if found["heads_dim"] == 1 else 1], cos.shape[2]
    tables = (sizes[0], tokens, pairs)
    same = sizes == ctx.shape(b) and tables == ctx.shape(cos) == ctx.shape(sin)
    whole = pairs == a.shape[3] and found.get("pairs", pairs) == pairs
    return same and whole and a.dtype == b.dtype == tensor(node).dtype
