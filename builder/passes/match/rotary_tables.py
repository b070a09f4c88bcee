"""Finds where models make rotary tables, as cosines and sines or as complex numbers, and makes them with one op."""

from __future__ import annotations

from typing import Any

import torch

from precast.builder.graph.context import FxGraph, FxNode, PassContext, tensor
from precast.builder.graph.match import Bind, Bindings, Cast, Either, Mul, Number, Op, match
from precast.builder.passes.graph_pass import graph_pass, one_spelling_of_views
from precast.builder.passes.match.rotary import narrowed, rotated

aten = torch.ops.aten

_POSITIONS = Cast(Op(aten.unsqueeze.default, Bind("positions"), 2))
_ROW = Cast(Op(aten.unsqueeze.default, Bind("positions"), 1))
_OUTER = Op(aten.transpose.int, Op(aten.matmul.default, Cast(Bind("column")), _ROW), 1, 2)
_ANGLES = Either(Mul(_POSITIONS, Cast(Bind("inv_freq"))), _OUTER)
"""Products, or as transformers wrote them until 5.18: a column of frequencies times a row of positions."""
_HALVES = Op(aten.cat.default, [Bind("angles"), Bind("angles")], 2)
_PAIRS = Op(aten.repeat_interleave.self_int, Bind("angles"), 2, Either(-1, 2))


@graph_pass(stage="match", version=2, requires=("remove_noops", "normalise_views"), before=(one_spelling_of_views,))
def match_rotary_tables(graph: FxGraph, ctx: PassContext) -> bool:
    """cos(widen(positions * inv_freq)) * scale, and sin likewise -> widen(rotary_tables(positions, inv_freq)).

    The angles may be the outer product of both as well, transposed: `(inv_freq @ positions)^T`.
    """
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
            for end, half in zip((cos_end, sin_end), _tables(ctx, found, cos_scale, dtype), strict=True):
                ctx.replace(end, _widen(ctx, wide, half))
        changed = True
    return changed


def _angles(wide: FxNode, ctx: PassContext) -> Bindings | None:
    """Positions and frequencies, where the angles are their products in float32, as the op computes them."""
    widened = match(_HALVES, wide) or match(_PAIRS, wide)
    found = match(_ANGLES, widened["angles"]) if widened else None
    return found if found and tensor(wide).dtype == torch.float32 and _are_of_positions(found, ctx) else None


def _are_of_positions(found: Bindings, ctx: PassContext) -> bool:
    """Whether positions and float32 frequencies were found, of these one set or one for each token."""
    frequencies = _frequencies(found)
    if not isinstance(found["positions"], FxNode) or not isinstance(frequencies, FxNode):
        return False
    positions, inv_freq = tensor(found["positions"]), tensor(frequencies)
    if positions.dtype != torch.int64 or inv_freq.dtype != torch.float32:
        return False
    if "column" in found:
        return inv_freq.dim() == 3 and inv_freq.shape[0] == inv_freq.shape[2] == 1
    return inv_freq.dim() == 1 or ctx.shape(inv_freq)[:-1] == ctx.shape(positions)


def _frequencies(found: Bindings) -> Any:
    """As they were found: in a row, or in a column `[1, pairs, 1]`."""
    return found.get("inv_freq", found.get("column"))


def _num_pairs(found: Bindings) -> int:
    return tensor(_frequencies(found)).shape[1 if "column" in found else -1]


def _tables(ctx: PassContext, found: Bindings, scale: float, dtype: torch.dtype) -> tuple[FxNode, FxNode]:
    tables = torch.ops.precast.rotary_tables.default
    inv_freq = _frequencies(found)
    if "column" in found:
        inv_freq = ctx.call(aten.reshape.default, inv_freq, [-1])
    both = ctx.call(tables, found["positions"], inv_freq, scale=scale, dtype=dtype)
    return ctx.item(both, 0), ctx.item(both, 1)


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


class _Ones:
    """A tensor of ones, as long as its shape is that of another part of the pattern."""

    def match(self, value: Any, found: Bindings) -> Bindings | None:
        return found if isinstance(value, FxNode) and value.target is aten.ones_like.default else None


_UNIT = Op(aten.polar.default, _Ones(), _ANGLES)
_TURNS = Either(Mul(_UNIT, Number("scale")), _UNIT)
_COMPLEX = Op(aten.view_as_complex.default, Op(aten.reshape.default, Bind("x32"), Bind("pairs")))
_PRODUCT = Mul(_COMPLEX, Op(aten.unsqueeze.default, Bind("turns"), Number("heads_dim")))
_COMPLEX_ROTATION = Op(aten.reshape.default, Op(aten.view_as_real.default, _PRODUCT), Bind("shape"))


@graph_pass(stage="match", version=2, requires=("remove_noops", "normalise_views"), before=(one_spelling_of_views,))
def match_complex_rotary(graph: FxGraph, ctx: PassContext) -> bool:
    """real(complex(x) * polar(1, positions * inv_freq)) -> rotary(x, rotary_tables(positions, inv_freq), interleaved).

    `rotary` takes heads after tokens: heads before tokens are exchanged on both sides.
    """
    tables: dict[FxNode, tuple[FxNode, FxNode]] = {}
    changed = False
    for node in list(graph.nodes):
        found = match(_COMPLEX_ROTATION, node) if node.target is aten.reshape.default else None
        turns = match(_TURNS, found["turns"]) if found and isinstance(found["turns"], FxNode) else None
        if found is None or turns is None or not _is_complex_rotation(node, found, turns, ctx):
            continue
        place = found["turns"]
        if place not in tables:
            with ctx.before(place):
                tables[place] = _tables(ctx, turns, float(turns.get("scale", 1.0)), torch.float32)
        x, end = narrowed(found["x32"], node)
        with ctx.before(end):
            ctx.replace(end, rotated(ctx, x, *tables[place], heads_dim=found["heads_dim"], interleaved=True))
        changed = True
    return changed


def _is_complex_rotation(node: FxNode, found: Bindings, turns: Bindings, ctx: PassContext) -> bool:
    """Whether neighbours are the pairs, of whole float32 heads, turned by float32 angles with a row for each token."""
    x = tensor(found["x32"])
    if x.dim() != 4 or x.dtype != torch.float32 or found["heads_dim"] not in (1, 2):
        return False
    if not _are_of_positions(turns, ctx):
        return False
    sizes = ctx.shape(x)
    tokens, pairs = sizes[2 if found["heads_dim"] == 1 else 1], _num_pairs(turns)
    split = node.args[0].args[0]
    return (
        ctx.shape(split) == (*sizes[:3], pairs)
        and ctx.shape(found["turns"]) == (sizes[0], tokens, pairs)
        and ctx.shape(node) == sizes
    )
