"""Finds rotary embeddings that are written as products of complex numbers (DeepSeek-V2, Llama 4)."""

from __future__ import annotations

from typing import Any

import torch

from precast.builder.graph.context import FxGraph, FxNode, PassContext, tensor
from precast.builder.graph.match import Bindings, Capture, Cast, Either, Mul, Number, Op, match
from precast.builder.passes.graph_pass import graph_pass
from precast.builder.passes.invariants import one_spelling_of_views
from precast.builder.passes.match.match_rotary import rotated

aten = torch.ops.aten

_POSITIONS = Cast(Op(aten.unsqueeze.default, Capture("positions"), 2))


class _Ones:
    """A tensor of ones, as long as its shape is that of another part of the pattern."""

    def match(self, value: Any, found: Bindings) -> Bindings | None:
        return found if isinstance(value, FxNode) and value.target is aten.ones_like.default else None


_UNIT = Op(aten.polar.default, _Ones(), Mul(_POSITIONS, Cast(Capture("inv_freq"))))
_TURNS = Either(Mul(_UNIT, Number("scale")), _UNIT)
_PAIRS = Op(aten.view_as_complex.default, Op(aten.reshape.default, Capture("x32"), Capture("pairs")))
_ROTATION = Op(
    aten.reshape.default,
    Op(
        aten.view_as_real.default,
        Mul(_PAIRS, Op(aten.unsqueeze.default, Capture("turns"), Number("heads_dim"))),
    ),
    Capture("shape"),
)


@graph_pass(stage="match", version=1, requires=("remove_noops", "normalise_views"), before=(one_spelling_of_views,))
def match_complex_rotary(graph: FxGraph, ctx: PassContext) -> bool:
    """real(complex(x) * polar(1, positions * inv_freq)) -> rotary(x, rotary_tables(positions, inv_freq), interleaved).

    `rotary` takes heads after tokens: heads before tokens are exchanged on both sides.
    """
    tables: dict[FxNode, tuple[FxNode, FxNode]] = {}
    changed = False
    for node in list(graph.nodes):
        found = match(_ROTATION, node) if node.target is aten.reshape.default else None
        turns = match(_TURNS, found["turns"]) if found and isinstance(found["turns"], FxNode) else None
        if found is None or turns is None or not _is_rotation(node, found, turns, ctx):
            continue
        place = found["turns"]
        if place not in tables:
            tables[place] = _tables(ctx, place, turns)
        _replace(ctx, node, found, tables[place])
        changed = True
    return changed


def _is_rotation(node: FxNode, found: Bindings, turns: Bindings, ctx: PassContext) -> bool:
    """Whether neighbours are the pairs, of whole float32 heads, turned by float32 angles with a row for each token.

    The frequencies are one set, or one for each token.
    """
    x, positions, inv_freq = tensor(found["x32"]), tensor(turns["positions"]), tensor(turns["inv_freq"])
    if x.dim() != 4 or x.dtype != torch.float32 or found["heads_dim"] not in (1, 2):
        return False
    if positions.dtype != torch.int64 or inv_freq.dtype != torch.float32:
        return False
    if inv_freq.dim() != 1 and ctx.shape(inv_freq)[:-1] != ctx.shape(positions):
        return False
    sizes = ctx.shape(x)
    tokens, pairs = sizes[2 if found["heads_dim"] == 1 else 1], inv_freq.shape[-1]
    split = node.args[0].args[0]
    return (
        ctx.shape(split) == (*sizes[:3], pairs)
        and ctx.shape(found["turns"]) == (sizes[0], tokens, pairs)
        and ctx.shape(node) == sizes
    )


def _tables(ctx: PassContext, place: FxNode, turns: Bindings) -> tuple[FxNode, FxNode]:
    with ctx.before(place):
        both = ctx.call(
            torch.ops.precast.rotary_tables.default, turns["positions"], turns["inv_freq"],
            scale=float(turns.get("scale", 1.0)), dtype=torch.float32,
        )  # fmt: skip
        return ctx.item(both, 0), ctx.item(both, 1)


def _replace(ctx: PassContext, node: FxNode, found: Bindings, tables: tuple[FxNode, FxNode]) -> None:
    x, end = found["x32"], node
    if len(node.users) == 1 and x.target is aten.to.dtype:
        # computed in float32 around half precision heads, as the op does itself
        (user,) = node.users
        if user.target is aten.to.dtype and tensor(user).dtype == tensor(x.args[0]).dtype:
            x, end = x.args[0], user
    with ctx.before(end):
        ctx.replace(end, rotated(ctx, x, *tables, heads_dim=found["heads_dim"], interleaved=True))
