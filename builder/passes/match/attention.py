"""Finds attention that a model writes out: softmax of masked products of queries and keys, times values.

What stands between the product and the softmax (scales, masks, biases that grow with distance, in any order and
shape) isn't matched node by node. It is computed on numbers: from what it does to random scores follow the scale,
the window and the slopes, and only if `precast.attention` with these gives the same probabilities is it replaced.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from precast.builder.graph.context import FxGraph, FxNode, PassContext, tensor
from precast.builder.graph.evaluate import NotComputable, evaluate, example_inputs
from precast.builder.graph.nodes import origins, placeholder
from precast.builder.passes.graph_pass import graph_pass
from precast.kernels.attention.attend import visible_keys

aten = torch.ops.aten

_PRODUCTS = {aten.matmul.default: (0, 1), aten.bmm.default: (0, 1), aten.baddbmm.default: (1, 2)}
_THROUGH = {
    # what may stand between probabilities and their product with the values
    aten.to.dtype, aten.reshape.default, aten.view.default, aten.dropout.default, aten.type_as.default,
}  # fmt: skip
_SHORT = 48
"""Tokens for which the probabilities are compared, unless a mask is a table: then all of the table."""
_LONG = 2048
"""The longest table that is looked at: its probabilities, for every head, are compared in memory."""
_TOLERANCE = 1e-5


@dataclasses.dataclass
class _Site:
    """One attention in the graph: `logits` = f(`scores`), `softmax` of them, times `values` = `out`."""

    scores: FxNode
    query: FxNode
    key: FxNode
    logits: FxNode
    softmax: FxNode
    value: FxNode
    out: FxNode


@dataclasses.dataclass
class _Finding:
    """What was found of f."""

    scale: float
    window: int | None
    slopes: torch.Tensor | None


@graph_pass(stage="match", version=2)
def match_attention(graph: FxGraph, ctx: PassContext) -> bool:
    """softmax(f(q @ k^T)) @ v -> attention(q, k, v), where f scales, masks and adds a bias by distance."""
    changed = False
    for node in list(graph.nodes):
        site = _site(node) if node.target in (aten.softmax.int, aten._softmax.default) else None
        finding = _find(site, ctx) if site else None
        if site and finding:
            _replace(ctx, site, finding)
            changed = True
    return changed


def _site(softmax: FxNode) -> _Site | None:
    logits = softmax.args[0]
    if softmax.args[1] not in (-1, tensor(softmax).dim() - 1) or not _is_square(logits):
        return None
    out: FxNode = softmax
    while True:
        if len(out.users) != 1:
            return None
        (user,) = out.users
        if user.target in _THROUGH and user.args[0] is out:
            out = user
            continue
        if user.target in (aten.matmul.default, aten.bmm.default) and user.args[0] is out:
            break
        return None
    scores = _product(logits)
    if scores is None:
        return None
    query, key = (scores.args[index] for index in _PRODUCTS[scores.target])
    site = _Site(scores, query, key, logits, softmax, user.args[1], user)
    return site if _is_of_heads(site) else None


def _is_of_heads(site: _Site) -> bool:
    """Whether all are `[1, H, ...]` or `[H, ...]`, of as many heads, or of key and value heads that queries share."""
    parts = [tensor(node) for node in (site.query, site.key, site.value, site.out)]
    if any(part.dim() not in (3, 4) or (part.dim() == 4 and part.shape[0] != 1) for part in parts):
        return False
    heads = [part.shape[-3] for part in parts]
    if not all(isinstance(count, int) for count in heads):
        return False
    queries, keys, values, out = heads
    return queries == out and keys == values and queries % keys == 0


def _is_square(node: FxNode) -> bool:
    """Whether the last two dimensions are both the number of tokens."""
    shape: Any = tensor(node).shape
    return len(shape) in (3, 4) and not isinstance(shape[-1], int) and bool(shape[-1] == shape[-2])


def _product(logits: FxNode) -> FxNode | None:
    """The one product that the logits are made of."""

    def products(node: FxNode) -> list[FxNode]:
        nodes = origins(node, goes_on=lambda other: not _is_product(other))
        return [other for other in nodes if _is_product(other)]

    found = products(logits)
    if len(found) == 1 and found[0].target is aten.baddbmm.default:
        found += products(found[0].args[0])
    return found[0] if len(found) == 1 else None


def _is_product(node: FxNode) -> bool:
    return node.target in _PRODUCTS and _is_square(node)


# --- what f does ---------------------------------------------------------------------------------------------------


def _find(site: _Site, ctx: PassContext) -> _Finding | None:
    size = min(ctx.options.max_seq_len, _size_of_tables(site, ctx))
    if size > _LONG:
        return None  # a window in a mask of this size could not be told from none
    try:
        generator = torch.Generator().manual_seed(0)
        heads = int(tensor(site.softmax).numel() // tensor(site.softmax).shape[-1] // tensor(site.softmax).shape[-2])
        first, second = (torch.randn(heads, size, size, generator=generator) for _ in range(2))
        with torch.no_grad():
            bias, one, two = (_logits(site, ctx, scores) for scores in (torch.zeros_like(first), first, second))
    except (NotComputable, RuntimeError):  # it needs a param, or another shape of scores: no attention of this kind
        return None
    window = _window(torch.softmax(one, -1)[0] > 0)
    if window == 0:
        return None
    visible = visible_keys(torch.arange(size), torch.arange(size), window)
    below = visible.clone().fill_diagonal_(False)
    given = first[:, visible].double()
    scale = float(((one - bias)[:, visible].double() * given).sum() / (given * given).sum())
    finding = _Finding(_rounded(scale), window, None)
    distance = (torch.arange(size)[None] - torch.arange(size)[:, None]).double()
    relative = bias.double() - bias.double().diagonal(dim1=-2, dim2=-1)[..., None]
    ratios = (relative / distance.masked_fill(distance == 0, 1.0))[:, below]
    slopes = ratios.median(-1).values.float() if bool(below.any()) else torch.zeros(heads)
    if float(slopes.abs().max()) > _TOLERANCE:
        finding.slopes = slopes
    steps = 0.0 if finding.slopes is None else finding.slopes[:, None, None] * distance
    expected = torch.softmax((finding.scale * second + steps).masked_fill(~visible, float("-inf")), -1)
    found = torch.softmax(two, -1)
    return finding if torch.allclose(found.double(), expected.double(), atol=_TOLERANCE, rtol=1e-3) else None


def _size_of_tables(site: _Site, ctx: PassContext) -> int:
    """As many tokens as a table that f looks into has rows, so that no window in it is overlooked."""
    largest = _SHORT
    for node in origins(site.logits, goes_on=lambda node: node is not site.query and node is not site.key):
        table = ctx.constant(node)
        if table is not None and table.dim() >= 2 and table.shape[-1] == table.shape[-2]:
            largest = max(largest, int(table.shape[-1]))
        if node.target is torch.ops.precast_trace.causal_mask.default and node.kwargs["window"] is not None:
            largest = max(largest, node.kwargs["window"] + 8)
    return largest


def _logits(site: _Site, ctx: PassContext, scores: torch.Tensor) -> torch.Tensor:
    """f(scores) for one sequence, `[H, size, size]`, with `scores` in the place of the product.

    It is computed in float32 also where the model computes in half precision: the scale, the window and the slopes that
    are read off it are the same for every dtype.
    """
    heads, size, _ = scores.shape
    known: dict[FxNode, Any] = dict(example_inputs(site.out.graph, size))
    shape = [size if not isinstance(extent, int) else extent for extent in tensor(site.scores).shape]
    placed = scores.reshape(shape)
    if site.scores.target is aten.baddbmm.default:
        beta, alpha = site.scores.kwargs.get("beta", 1), site.scores.kwargs.get("alpha", 1)
        placed = beta * evaluate(site.scores.args[0], known, ctx, exact=True) + alpha * placed
    known[site.scores] = placed
    logits: torch.Tensor = evaluate(site.logits, known, ctx, exact=True)
    return logits.float().reshape(heads, size, size)


def _window(seen: torch.Tensor) -> int | None:
    """The window of a table of which query sees which key; None: all before it; 0: no causal window."""
    size = len(seen)
    count = int(seen[-1].sum())
    window = None if count == size else count
    at = torch.arange(size)
    return window if torch.equal(seen, visible_keys(at, at, window)) else 0


def _rounded(scale: float) -> float:
    """The scale as the model's author wrote it: a power of the head size, or a number of few digits, in float64."""
    for candidate in (round(scale, 4), *(float(n) ** -0.5 for n in range(1, 1025))):
        if abs(candidate - scale) < 1e-5 * abs(scale):
            return candidate
    return scale


# --- the replacement -----------------------------------------------------------------------------------------------


def _replace(ctx: PassContext, site: _Site, finding: _Finding) -> None:
    cu_seqlens = placeholder(site.out.graph, "cu_seqlens")
    slopes = _slopes(ctx, cu_seqlens, finding.slopes)
    dtype = tensor(site.out).dtype
    with ctx.before(site.out):
        q = _tokens_first(ctx, site.query, -2, dtype)
        k = _tokens_first(ctx, site.key, -1, dtype)
        v = _tokens_first(ctx, site.value, -2, dtype)
        out = ctx.call(
            torch.ops.precast.attention.default, q, k, v, None, cu_seqlens,
            scale=finding.scale, window=finding.window, soft_cap=None, **({} if slopes is None else {"slopes": slopes}),
        )  # fmt: skip
        out = ctx.call(aten.transpose.int, out, 1, 2)
        if tensor(site.out).dim() == 3:
            out = ctx.call(aten.squeeze.dim, out, 0)
    ctx.replace(site.out, out)


def _tokens_first(ctx: PassContext, node: FxNode, tokens: int, dtype: torch.dtype) -> FxNode:
    """`[1, H, T, D]`, `[H, T, D]`, or with the last two exchanged (`tokens` -1), as `[1, T, H, D]`."""
    if tensor(node).dtype != dtype and node.target is aten.to.dtype and tensor(node.args[0]).dtype == dtype:
        node = node.args[0]  # widened for the product, as our op does by itself
    if tensor(node).dtype != dtype:
        node = ctx.call(aten.to.dtype, node, dtype)
    if tensor(node).dim() == 3:
        node = ctx.call(aten.unsqueeze.default, node, 0)
    if tokens == -1:
        node = ctx.call(aten.transpose.int, node, 2, 3)
    return ctx.call(aten.transpose.int, node, 1, 2)


def _slopes(ctx: PassContext, after: FxNode, slopes: torch.Tensor | None) -> FxNode | None:
    """The slopes as a constant; one for all layers that have the same."""
    if slopes is None:
        return None
    for name, info in ctx.constants.items():
        if info.value.shape == slopes.shape and torch.equal(info.value, slopes):
            return placeholder(after.graph, name)
    return ctx.new_constant(after, f"alibi_slopes_{len(ctx.constants)}", slopes)
