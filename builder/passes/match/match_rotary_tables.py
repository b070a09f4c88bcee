"""Finds the cosine and sine tables of rotary embeddings and makes them with one op, half as wide."""

from __future__ import annotations

import torch

from precast.builder.graph.context import FxGraph, FxNode, PassContext, tensor
from precast.builder.graph.match import Bindings, Capture, Cast, Either, Mul, Op, match
from precast.builder.passes.graph_pass import graph_pass
from precast.builder.passes.invariants import one_spelling_of_views

aten = torch.ops.aten

_POSITIONS = Cast(Op(aten.unsqueeze.default, Capture("positions"), 2))
_ANGLES = Mul(_POSITIONS, Cast(Capture("inv_freq")))
_HALVES = Op(aten.cat.default, [Capture("angles"), Capture("angles")], 2)
_PAIRS = Op(aten.repeat_interleave.self_int, Capture("angles"), 2, Either(-1, 2))


@graph_pass(stage="match", version=1, requires=("remove_noops", "normalise_views"), before=(one_spelling_of_views,))
def match_rotary_tables(graph: FxGraph, ctx: PassContext) -> bool:
    """cos(widen(positions * inv_freq)) * scale, and sin likewise -> widen(rotary_tables(positions, inv_freq))."""
    changed = False
    for cos in list(graph.nodes):
        if cos.target is not aten.cos.default:
            continue
        wide = cos.args[0]
        found = _angles(wide, ctx)
        sines = [user for user in wide.users if user.target is aten.sin.default]
        if found is None or len(sines) != 1:
            continue
        cos_end, cos_scale = _scaled(cos)
        sin_end, sin_scale = _scaled(sines[0])
        dtype = tensor(cos_end).dtype
        if cos_scale != sin_scale or tensor(sin_end).dtype != dtype:
            continue
        with ctx.before(wide):
            tables = ctx.call(
                torch.ops.precast.rotary_tables.default, found["positions"], found["inv_freq"],
                scale=cos_scale, dtype=dtype,
            )  # fmt: skip
            for index, end in enumerate((cos_end, sin_end)):
                half = ctx.item(tables, index)
                ctx.replace(end, _widen(ctx, wide, half))
        changed = True
    return changed


def _angles(wide: FxNode, ctx: PassContext) -> Bindings | None:
    """Positions and frequencies, where the angles are their products in float32, as the op computes them."""
    widened = match(_HALVES, wide) or match(_PAIRS, wide)
    found = match(_ANGLES, widened["angles"]) if widened else None
    if found is None or not all(isinstance(node, FxNode) for node in found.values()):
        return None
    positions, inv_freq = tensor(found["positions"]), tensor(found["inv_freq"])
    if tensor(wide).dtype != torch.float32 or inv_freq.dtype != torch.float32 or positions.dtype != torch.int64:
        return None
    one_set = inv_freq.dim() == 1
    return found if one_set or ctx.shape(inv_freq)[:-1] == ctx.shape(positions) else None


def _scaled(node: FxNode) -> tuple[FxNode, float]:
    """The end of the chain `* number`, `.to(dtype)` after the node, and the product of the numbers.

    The chain ends with the first conversion: after it, products are rounded to another type.
    """
    scale = 1.0
    while len(node.users) == 1:
        (user,) = node.users
        if user.target is aten.to.dtype:
            return user, scale
        if user.target is not aten.mul.Tensor or not isinstance(user.args[1], float):
            break
        scale *= user.args[1]
        node = user
    return node, scale


def _widen(ctx: PassContext, wide: FxNode, half: FxNode) -> FxNode:
    if match(_PAIRS, wide):
        return ctx.call(aten.repeat_interleave.self_int, half, 2, 2)
    return ctx.call(aten.cat.default, [half, half], 2)
