"""Finds rotations of query and key heads by the rotary tables, in halves and in pairs."""

from __future__ import annotations

from typing import Any

import torch

from precast.builder.graph.context import FxGraph, FxNode, PassContext, tensor
from precast.builder.graph.match import Add, Bind, Bindings, Cast, Either, Mul, Number, Op, match
from precast.builder.passes.graph_pass import graph_pass, node_pass

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
            with ctx.before(node):
                cos, sin = found["cos"], found["sin"]
                new = rotated(ctx, found["x"], cos, sin, heads_dim=1, interleaved=found["interleaved"])
            ctx.replace(node, new)
            changed = True
    return changed


def _is_rotation(found: Bindings) -> bool:
    """Whether pairs of the whole head are rotated, by tables with a place for the heads."""
    size = tensor(found["x32"]).shape[3]
    halves = found.get("half", size // 2)
    return found["heads_dim"] in (1, 2) and found["size"] == size and 2 * halves == size


def _replace(ctx: PassContext, node: FxNode, found: Bindings, interleaved: bool) -> bool:
    x, end = narrowed(found["x32"], node)
    if tensor(end).dtype != tensor(x).dtype:
        return False  # wider tables make a wider result, which the op does not
    with ctx.before(end):
        heads_dim = found["heads_dim"]
        new = rotated(ctx, x, found["cos"], found["sin"], heads_dim=heads_dim, interleaved=interleaved)
    ctx.replace(end, new)
    return True


def narrowed(x: FxNode, rotation: FxNode) -> tuple[FxNode, FxNode]:
    """Heads and result of a rotation; both before and after a detour through float32, which the op makes itself."""
    heads = x.args[0] if x.target is aten.to.dtype else x
    if tensor(rotation).dtype == torch.float32 and len(rotation.users) == 1:
        (user,) = rotation.users
        if user.target is aten.to.dtype and tensor(user).dtype == tensor(heads).dtype:
            return heads, user
    return x, rotation


def rotated(ctx: PassContext, x: FxNode, cos: FxNode, sin: FxNode, *, heads_dim: int, interleaved: bool) -> FxNode:
    """The heads `x` `[1, T, H, D]`, or with heads before tokens (`heads_dim` 1), turned by the tables."""
    if heads_dim == 1:
        x = ctx.call(aten.transpose.int, x, 1, 2)
    new = ctx.call(torch.ops.precast.rotary.default, x, cos, sin, interleaved=interleaved)
    return ctx.call(aten.transpose.int, new, 1, 2) if heads_dim == 1 else new


def _table(name: str, interleaved: bool) -> Any:
    """A table as wide as a head, with a dimension for the heads: before the tokens (1) or after them (2)."""
    half = Bind(name)
    wide = Op(aten.repeat_interleave.self_int, half, 2, 2) if interleaved else Op(aten.cat.default, [half, half], 2)
    return Op(aten.unsqueeze.default, wide, Number("heads_dim"))


def _rotated(interleaved: bool) -> Any:
    x = Bind("x32")
    if interleaved:
        even = Op(aten.slice.Tensor, x, 3, 0, Number("size"), 2)
        odd = Op(aten.slice.Tensor, x, 3, 1, Number("size"), 2)
        return Op(aten.reshape.default, Op(aten.stack.default, [Op(aten.neg.default, odd), even], 4), Bind("shape"))
    lower = Op(aten.slice.Tensor, x, 3, 0, Number("half"), 1)
    upper = Op(aten.slice.Tensor, x, 3, Number("half"), Number("size"), 1)
    return Op(aten.cat.default, [Op(aten.neg.default, upper), lower], 3)


def _rotation(interleaved: bool) -> Any:
    cos, sin = (Cast(_table(name, interleaved)) for name in ("cos", "sin"))
    return Add(Mul(Bind("x32"), cos), Mul(_rotated(interleaved), sin))


_PATTERNS = {interleaved: _rotation(interleaved) for interleaved in (False, True)}
_ROTATED_PART = Op(
    "precast.rotary.default",
    Op(aten.transpose.int, Op(aten.slice.Tensor, Bind("x"), 3, 0, Number("size"), 1), 1, 2), Bind("cos"), Bind("sin"),
    interleaved=Bind("interleaved"),
)  # fmt: skip
_REST = Op(aten.slice.Tensor, Bind("x"), 3, Number("size"), Number("end"), 1)
_PARTIAL = Op(aten.cat.default, [Op(aten.transpose.int, _ROTATED_PART, 1, 2), _REST], 3)


def _paired_table(name: str) -> Any:
    """The table itself, cut from one that holds it twice, with a dimension for the heads."""
    half = Bind(name)
    cut = Op(aten.slice.Tensor, Op(aten.cat.default, [half, half], 2), 2, 0, Number("pairs"), 1)
    return Op(aten.unsqueeze.default, Either(cut, half), Number("heads_dim"))


_A, _B, _COS, _SIN = Bind("a"), Bind("b"), _paired_table("cos"), _paired_table("sin")
_PAIRED = Op(
    aten.cat.default,
    [Op(aten.sub.Tensor, Mul(_A, _COS), Mul(_B, _SIN)), Add(Mul(_B, _COS), Mul(_A, _SIN))],
    3,
)


@node_pass(stage="match", version=1, requires=("match_rotary_tables",))
def match_paired_rotary(ctx: PassContext, node: FxNode) -> FxNode | None:
    """cat(a * cos - b * sin, b * cos + a * sin) -> rotary(cat(a, b), cos, sin), with the heads after the tokens.

    `a` and `b` are the even and the odd elements of a head, or any others: their halves are not put back in pairs.
    """
    found = match(_PAIRED, node) if node.target is aten.cat.default else None
    if found is None or not _is_paired_rotation(node, found, ctx):
        return None
    x = ctx.call(aten.cat.default, [found["a"], found["b"]], 3)
    return rotated(ctx, x, found["cos"], found["sin"], heads_dim=found["heads_dim"], interleaved=False)


def _is_paired_rotation(node: FxNode, found: Bindings, ctx: PassContext) -> bool:
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
