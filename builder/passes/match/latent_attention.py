"""Finds attention whose keys and values are made from a latent, as in DeepSeek-V2 and its relatives."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from precast.builder.graph.context import FxNode, PassContext, tensor
from precast.builder.passes.graph_pass import node_pass

aten = torch.ops.aten

_KNOWN = {"scale", "window"}
"""What latent attention knows of the options of attention."""


class Latents(NamedTuple):
    """What the keys and values of an attention are made from: its queries, the latents and what heads share of the keys
    as latent attention takes them, the weight, and the elements of a value."""

    queries: FxNode
    latent: FxNode
    k_rope: FxNode
    weight: FxNode
    value_size: int


class _Part(NamedTuple):
    """Elements `start .. end` of each head of `linear`, whose result is taken as heads of `size`."""

    linear: FxNode
    heads: int
    size: int
    start: int
    end: int


class _Keys(NamedTuple):
    """The two parts of the keys: one of each head, and one `[1, T, Dr]` that all heads share."""

    own: _Part
    shared: FxNode
    shared_first: bool


@node_pass(stage="match", version=1, requires=("assemble_copies", "normalise_linear"))
def match_latent_attention(ctx: PassContext, node: FxNode) -> FxNode | None:
    """attention(q, cat(k, expand(k_rope)), v) with k, v = split(linear(latent)) -> latent_attention(q, latent, k_rope).

    Legal when k and v are all that each head of the product has, in this order, the product has no bias, and the
    attention no sinks and no option that latent attention doesn't know.
    """
    if node.target is not torch.ops.precast.attention.default:
        return None
    q, k, v, sinks, cu_seqlens = node.args
    plain = sinks is None and all(node.kwargs[name] is None for name in node.kwargs.keys() - _KNOWN)
    made = latents_of(ctx, q, k, v) if plain else None
    if made is None:
        return None
    return ctx.call(
        torch.ops.precast.latent_attention.default,
        *made[:4],
        cu_seqlens,
        value_size=made.value_size,
        **{name: value for name, value in node.kwargs.items() if name in _KNOWN},
    )


def latents_of(ctx: PassContext, q: FxNode, k: FxNode, v: FxNode) -> Latents | None:
    """What queries, keys and values of an attention are made from, in new nodes where they have another order; None if
    it isn't latents."""
    keys, values = _keys(k, ctx), _part(v, False, ctx)
    if keys is None or values is None or not _fits(q, keys, values):
        return None
    latent, k_rope = _tokens(ctx, values.linear.args[0]), _tokens(ctx, keys.shared)
    return Latents(_queries(ctx, q, keys), latent, k_rope, values.linear.args[1], values.end - values.start)


def _fits(q: FxNode, keys: _Keys, values: _Part) -> bool:
    """Whether each query head has a key head of its own, and its product is the key, then the value."""
    own = keys.own
    one_product = own.linear is values.linear and own.heads == values.heads == tensor(q).shape[2]
    in_order = own.start == 0 and own.end == values.start and values.end == own.size == values.size
    return one_product and in_order


def _keys(k: FxNode, ctx: PassContext) -> _Keys | None:
    k, heads_first = _without_exchange(k)
    if k.target is not aten.cat.default or k.args[1] != 3 or len(k.args[0]) != 2:
        return None
    for shared_first in (False, True):
        own, shared = reversed(k.args[0]) if shared_first else k.args[0]
        part, source = _part(own, heads_first, ctx), _shared(shared, heads_first, ctx)
        if part is not None and source is not None:
            return _Keys(part, source, shared_first)
    return None


def _part(node: FxNode, heads_first: bool, ctx: PassContext) -> _Part | None:
    """What of a product's heads the node is, heads before tokens or after them; None where it is something else."""
    bounds = None
    while node.target is aten.transpose.int or node.target is aten.slice.Tensor:
        if node.target is aten.transpose.int:
            if set(node.args[1:]) != {1, 2}:
                return None
            heads_first = not heads_first
        else:
            _, dim, start, end, step = node.args
            if bounds is not None or dim != 3 or step != 1:
                return None
            bounds = start, end
        node = node.args[0]
    if heads_first or bounds is None or node.target is not aten.reshape.default or tensor(node).dim() != 4:
        return None
    linear = node.args[0]
    if linear.target is not aten.linear.default or any(bias is not None for bias in linear.args[2:]):
        return None
    one, tokens, heads, size = ctx.shape(node)
    if not isinstance(heads, int) or not isinstance(size, int) or _rows(linear, ctx) != (one, tokens, heads * size):
        return None
    return _Part(linear, heads, size, *bounds)


def _shared(node: FxNode, heads_first: bool, ctx: PassContext) -> FxNode | None:
    """What every head has a copy of, with one head or none: it has a row for each token; None for anything else."""
    heads_dim = 1 if heads_first else 2
    node, is_exchanged = _without_exchange(node)
    if is_exchanged:
        heads_dim = 3 - heads_dim
    if node.target is aten.expand.default:
        node = node.args[0]
    if tensor(node).dim() != 4 or ctx.shape(node)[heads_dim] != 1:
        return None
    return _without_exchange(node)[0]


def _without_exchange(node: FxNode) -> tuple[FxNode, bool]:
    """What stands before an exchange of tokens and heads, and whether there is one."""
    is_exchange = node.target is aten.transpose.int and set(node.args[1:]) == {1, 2}
    return (node.args[0], True) if is_exchange else (node, False)


def _rows(node: FxNode, ctx: PassContext) -> Any:
    """The shape `[1, T, size]` of a tensor that has it, or a dimension of one head more."""
    shape = list(ctx.shape(node))
    if len(shape) == 4 and 1 in shape[1:3]:
        del shape[1 + shape[1:3].index(1)]
    return tuple(shape)


def _tokens(ctx: PassContext, node: FxNode) -> FxNode:
    """The node as `[1, T, size]`: what it was made from, where that has the shape already."""
    shape = _rows(node, ctx)
    if node.target is aten.reshape.default and ctx.shape(node.args[0]) == shape:
        return node.args[0]
    if tensor(node).dim() == 3:
        return node
    return ctx.call(aten.reshape.default, node, [1, -1, shape[-1]])


def _queries(ctx: PassContext, q: FxNode, keys: _Keys) -> FxNode:
    """The queries with the part for the shared keys at the end, and without an exchange around their parts."""
    whole, heads_first = _without_exchange(q)
    own = keys.own.end
    if whole.target is aten.cat.default and whole.args[1] == 3 and len(whole.args[0]) == 2:
        parts = list(whole.args[0])
        first = tensor(parts[0]).shape[3]
        if first == (tensor(q).shape[3] - own if keys.shared_first else own):
            if heads_first:
                parts = [ctx.call(aten.transpose.int, part, 1, 2) for part in parts]
            return ctx.call(aten.cat.default, parts[::-1] if keys.shared_first else parts, 3)
    if not keys.shared_first:
        return q
    size = tensor(q).shape[3]
    bounds = ((size - own, size), (0, size - own))
    parts = [ctx.call(aten.slice.Tensor, q, 3, start, end, 1) for start, end in bounds]
    return ctx.call(aten.cat.default, parts, 3)
