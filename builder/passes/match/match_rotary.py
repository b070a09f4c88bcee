"""Finds rotations of query and key heads by the rotary tables."""

from __future__ import annotations

from typing import Any

import torch

from precast.builder.graph.context import FxGraph, FxNode, PassContext, tensor
from precast.builder.graph.match import Add, Bindings, Capture, Cast, Mul, Number, Op, match
from precast.builder.passes.graph_pass import graph_pass

aten = torch.ops.aten


@graph_pass(stage="match", version=1, requires=("match_rotary_tables",))
def match_rotary(graph: FxGraph, ctx: PassContext) -> bool:
    """x * cos + rotate_half(x) * sin -> rotary(x, cos, sin), with the heads after the tokens.

    Heads before tokens (`[1, H, T, D]`) are exchanged on both sides; later passes cancel that against the
    exchanges around the attention. A part of the head that passes through unrotated is taken into the op.
    """
    changed = False
    for node in list(graph.nodes):
        for interleaved, pattern in _PATTERNS.items():
            found = match(pattern, node) if node.op == "call_function" else None
            if found is not None and _is_rotation(found):
                changed |= _replace(ctx, node, found, interleaved)
    for node in list(graph.nodes):
        found = match(_PARTIAL, node) if node.target is aten.cat.default else None
        if found is not None and found["end"] == tensor(found["x"]).shape[3]:
            interleaved = found["rotation"].kwargs["interleaved"]
            with ctx.before(node):
                x, cos, sin = found["x"], found["cos"], found["sin"]
                ctx.replace(node, rotated(ctx, x, cos, sin, heads_dim=1, interleaved=interleaved))
            changed = True
    return changed


def _is_rotation(found: Bindings) -> bool:
    """Whether pairs of the whole head are rotated, by tables with a place for the heads."""
    size = tensor(found["x32"]).shape[3]
    halves = found.get("half", size // 2)
    return found["heads_dim"] in (1, 2) and found["size"] == size and 2 * halves == size


def _replace(ctx: PassContext, node: FxNode, found: Bindings, interleaved: bool) -> bool:
    x, end = found["x32"], node
    if tensor(node).dtype == torch.float32 and len(node.users) == 1:
        # computed in float32 around half precision heads, as the op does itself
        (user,) = node.users
        heads = x.args[0] if x.target is aten.to.dtype else x
        if user.target is aten.to.dtype and tensor(user).dtype == tensor(heads).dtype:
            x, end = heads, user
    if tensor(end).dtype != tensor(x).dtype:
        return False  # wider tables make a wider result, which the op does not
    with ctx.before(end):
        heads_dim = found["heads_dim"]
        new = rotated(ctx, x, found["cos"], found["sin"], heads_dim=heads_dim, interleaved=interleaved)
    ctx.replace(end, new)
    return True


def rotated(ctx: PassContext, x: FxNode, cos: FxNode, sin: FxNode, *, heads_dim: int, interleaved: bool) -> FxNode:
    """The heads `x` `[1, T, H, D]`, or with heads before tokens (`heads_dim` 1), turned by the tables."""
    if heads_dim == 1:
        x = ctx.call(aten.transpose.int, x, 1, 2)
    new = ctx.call(torch.ops.precast.rotary.default, x, cos, sin, interleaved=interleaved)
    return ctx.call(aten.transpose.int, new, 1, 2) if heads_dim == 1 else new


def _table(name: str, interleaved: bool) -> Any:
    """A table as wide as a head, with a dimension for the heads: before the tokens (1) or after them (2)."""
    half = Capture(name)
    wide = Op(aten.repeat_interleave.self_int, half, 2, 2) if interleaved else Op(aten.cat.default, [half, half], 2)
    return Op(aten.unsqueeze.default, wide, Number("heads_dim"))


def _rotated(interleaved: bool) -> Any:
    x = Capture("x32")
    if interleaved:
        even = Op(aten.slice.Tensor, x, 3, 0, Number("size"), 2)
        odd = Op(aten.slice.Tensor, x, 3, 1, Number("size"), 2)
        return Op(aten.reshape.default, Op(aten.stack.default, [Op(aten.neg.default, odd), even], 4), Capture("shape"))
    lower = Op(aten.slice.Tensor, x, 3, 0, Number("half"), 1)
    upper = Op(aten.slice.Tensor, x, 3, Number("half"), Number("size"), 1)
    return Op(aten.cat.default, [Op(aten.neg.default, upper), lower], 3)


def _rotation(interleaved: bool) -> Any:
    cos, sin = (Cast(_table(name, interleaved)) for name in ("cos", "sin"))
    return Add(Mul(Capture("x32"), cos), Mul(_rotated(interleaved), sin))


class _Rotary:
    """A `precast.rotary` node over `inner`, with its tables."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def match(self, value: Any, found: Bindings) -> Bindings | None:
        if not isinstance(value, FxNode) or value.target is not torch.ops.precast.rotary.default:
            return None
        x, cos, sin = value.args
        bound: Bindings | None = self.inner.match(x, found)
        return None if bound is None else {**bound, "cos": cos, "sin": sin, "rotation": value}


_PATTERNS = {interleaved: _rotation(interleaved) for interleaved in (False, True)}
_ROTATED_PART = Op(aten.transpose.int, Op(aten.slice.Tensor, Capture("x"), 3, 0, Number("size"), 1), 1, 2)
_PARTIAL = Op(
    aten.cat.default,
    [
        Op(aten.transpose.int, _Rotary(_ROTATED_PART), 1, 2),
        Op(aten.slice.Tensor, Capture("x"), 3, Number("size"), Number("end"), 1),
    ],
    3,
)
