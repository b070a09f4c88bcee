"""Finds sparse attention over latents: what selects keys, and attention that sees these alone, as in DeepSeek-V3.2."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch

from precast.builder.graph.context import FxGraph, FxNode, PassContext, tensor
from precast.builder.graph.match import Add, Anything, Bind, Cast, Either, Mul, Number, Op, match
from precast.builder.graph.nodes import largest, module_path
from precast.builder.passes.graph_pass import graph_pass
from precast.builder.passes.match.latent_attention import latents_of
from precast.ir.errors import BuildError

aten = torch.ops.aten

_MASK = Op(aten.select.int, Op("precast_trace.causal_mask.default", Anything(), Anything(), window=None, chunk=None,
                               dtype=Anything()), 1, 0)  # fmt: skip
_KEYS = Op(aten.unsqueeze.default, Cast(Op(aten.transpose.int, Bind("k"), 2, 1)), 1)
_PRODUCTS = Op(aten.matmul.default, Cast(Bind("q")), _KEYS)
_HEADS = Op(aten.relu.default, Either(Mul(_PRODUCTS, Number("scale")), _PRODUCTS))
_SCORES = Op(aten.squeeze.dim, Op(aten.matmul.default, Op(aten.unsqueeze.default, Bind("weights"), 2), _HEADS), 2)
_BEST = Op(aten.topk.default, Add(_SCORES, _MASK), Anything())
_SELECTED = Op(aten.to.dtype, Op(operator.getitem, _BEST, 1), torch.int32)
"""The positions of the keys of the largest sums over heads of weights * relu(scale * q @ k^T); a scale of 1 isn't
written."""


class _Selection(NamedTuple):
    """The query heads [1, T, H, D], the keys [1, T, D] and the weights [1, T, H] of a selection of `most` keys."""

    q: FxNode
    k: FxNode
    weights: FxNode
    scale: float
    most: int


@graph_pass(stage="match", version=1, requires=("assemble_copies", "normalise_linear", "normalise_views"))
def match_sparse_attention(graph: FxGraph, ctx: PassContext) -> bool:
    """topk(weights @ relu(q @ k^T)), attention to these keys -> select_keys(q, k, weights), sparse_latent_attention.

    Layers that attend to what an earlier one selected take its selection. Raises BuildError (feature-unsupported) for
    keys that are selected in another way, and for sparse attention over other than latents.
    """
    nodes = [node for node in graph.nodes if node.target is torch.ops.precast_trace.sparse_attention.default]
    made: dict[FxNode, FxNode] = {}
    for node in nodes:
        q, k, v, selected, sinks, cu_seqlens = node.args
        if selected not in made:
            made[selected] = _select(ctx, selected, cu_seqlens, node)
        with ctx.before(node):
            latents = latents_of(ctx, q, k, v)
            if latents is None:
                raise _refusal(node, "attends to some keys of each head, expected latents that all heads share")
            sparse = ctx.call(
                torch.ops.precast.sparse_latent_attention.default, *latents[:4], made[selected], sinks, cu_seqlens,
                value_size=latents.value_size, **node.kwargs,
            )  # fmt: skip
        ctx.replace(node, sparse)
    return bool(nodes)


def _select(ctx: PassContext, selected: FxNode, cu_seqlens: FxNode, user: FxNode) -> FxNode:
    """The selection as our op, where it was made."""
    found = _selection(selected)
    if found is None:
        raise _refusal(user, "selects keys in a way that precast doesn't know")
    with ctx.before(selected):
        return ctx.call(
            torch.ops.precast.select_keys.default, found.q, found.k, found.weights, cu_seqlens,
            scale=found.scale, count=found.most,
        )  # fmt: skip


def _selection(selected: FxNode) -> _Selection | None:
    found: dict[str, Any] | None = match(_SELECTED, selected)
    if found is None:
        return None
    scale, most = float(found.get("scale", 1.0)), largest(tensor(selected).shape[2])
    made = _Selection(found["q"], found["k"], found["weights"], scale, most)
    q, k, weights = (tensor(node) for node in made[:3])
    fits = q.dim() == 4 and k.dim() == 3 and weights.dim() == 3 and q.dtype == k.dtype
    return made if fits and weights.dtype == torch.float32 and made.most < 1 << 31 else None


def _refusal(node: FxNode, what: str) -> BuildError:
    limit = largest(tensor(node.args[3]).shape[2])
    fix = f"build with max_seq_len of at most {limit}: of so many tokens all keys are selected, and attention is full"
    return BuildError("feature-unsupported", f"{module_path(node)} {what}", fix=fix)
