"""Finds the routers of mixtures of experts: what lies between the scores of all experts and a layer's choice of them.

Models write the same choice in many ways. So no spelling is looked for: the part of the graph is cut out, computed on
random scores, and compared with `precast.route` for each meaning that it may have. What isn't met exactly stays.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterator
from typing import Any

import torch

from precast.builder.graph.context import FxGraph, FxNode, PassContext, expr_of, tensor
from precast.builder.graph.evaluate import NotComputable, evaluate
from precast.builder.graph.nodes import argument, origins
from precast.builder.passes.graph_pass import graph_pass
from precast.ir.graph import symbols
from precast.ir.ops.rows_experts import GROUP_SCORES, SCORINGS
from precast.kernels.route.route import route

aten = torch.ops.aten

_PRODUCTS = {aten.linear.default, aten.matmul.default, aten.addmm.default, aten.mm.default}
_TOKENS = 37
_SPREADS = (1.0, 0.2, 3.0)
_SHIFTS = (-14.0, -46.0)
"""Where sigmoids are as small as the constants that models add to their sums: 1e-6, 1e-20."""
_TOLERANCES = {torch.float32: 4e-6, torch.float64: 1e-12, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Relative: the order of a sum in float32, one rounding in half precision."""


@dataclasses.dataclass(frozen=True)
class _Router:
    """A part of a graph: from `logits` [T, E], and a `bias` of E elements where there is one, to `weights` and `ids`
    [T, K]."""

    logits: FxNode
    bias: FxNode | None
    weights: FxNode
    ids: FxNode
    inner: frozenset[FxNode]


@graph_pass(stage="match", version=1, requires=("remove_writes", "normalise_views"))
def match_routers(graph: FxGraph, ctx: PassContext) -> bool:
    """softmax, topk, normalise, ... before an `experts` -> route.

    Legal when the part of the graph and the op give the same experts and weights for several draws of scores, whose
    rows have no equal ones: which of equal ones is chosen, models leave open.
    """
    changed = False
    for node in list(graph.nodes):
        if node.target is not torch.ops.precast.experts.default:
            continue
        for router in _routers(node, ctx):
            attributes = _meaning(router, ctx)
            if attributes is not None:
                _replace(ctx, router, attributes)
                changed = True
                break
    return changed


def _replace(ctx: PassContext, router: _Router, attributes: dict[str, Any]) -> None:
    following: Any = router.logits.next
    while following.op == "placeholder":
        following = following.next
    with (
        ctx.before(router.ids),
        router.ids.graph.inserting_before(following),
    ):  # in the ids' layer, where the logits are
        bias = router.bias
        if bias is not None and tensor(bias).dim() != 1:
            bias = ctx.call(aten.reshape.default, bias, [tensor(router.logits).shape[1]])
        node = ctx.call(torch.ops.precast.route.default, router.logits, bias, **attributes)
        weights, ids = ctx.item(node, 0), ctx.item(node, 1)
    ctx.replace(router.weights, weights)
    ctx.replace(router.ids, ids)


# --- cutting out -------------------------------------------------------------------------------------------------


def _routers(experts: FxNode, ctx: PassContext) -> Iterator[_Router]:
    """What may be this layer's router, the largest part first: scores from the product on, weights to the layer."""
    _, ids, weights = experts.args[:3]
    whole = _inner(ctx, ids, weights)
    logits = next((source for source in _sources(whole, ctx) if source.target in _PRODUCTS), None)
    if logits is None or tensor(logits).dim() != 2:
        return
    starts = [logits, *_chain(logits, whole)]
    ends = [node for node in (weights, *reversed(_ordered(whole))) if _is_like(node, weights, ctx)]
    for start, end in itertools.product(starts, dict.fromkeys(ends)):
        inner = _inner(ctx, ids, end, stop=start)
        outside = _sources(inner, ctx) - {start}
        biases = [node for node in outside if _is_bias(node, start, ctx)]
        if start in inner or len(outside) != len(biases) or len(biases) > 1:
            continue
        if any(user not in inner for node in inner - {ids, end} for user in node.users):
            continue  # something else reads the middle of it, in the order in which it chose
        yield _Router(start, biases[0] if biases else None, end, ids, frozenset(inner))


def _inner(ctx: PassContext, *ends: FxNode, stop: FxNode | None = None) -> set[FxNode]:
    """The calls that these nodes come from, up to products and `stop`; sizes are none."""

    def is_inner(node: FxNode) -> bool:
        is_end = node is stop or node.op != "call_function" or node.target in _PRODUCTS or _is_size(node)
        return not is_end

    return {node for node in origins(*ends, goes_on=is_inner) if is_inner(node)}


def _sources(inner: set[FxNode], ctx: PassContext) -> set[FxNode]:
    """What the calls read from outside, but for sizes and constants."""
    read = {source for node in inner for source in node.all_input_nodes} - inner
    return {node for node in read if not _is_size(node) and ctx.constant(node) is None}


def _is_size(node: FxNode) -> bool:
    return not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))


def _chain(start: FxNode, inner: set[FxNode]) -> Iterator[FxNode]:
    """The nodes of `start`'s type that follow it one after the other: conversions, scales, caps."""
    node = start
    while len(users := [user for user in node.users if user in inner]) == 1 and len(node.users) == 1:
        node = users[0]
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor) or value.dim() != 2 or value.shape[1] != tensor(start).shape[1]:
            return
        yield node


def _ordered(inner: set[FxNode]) -> list[FxNode]:
    graph = next(iter(inner)).graph if inner else None
    return [node for node in graph.nodes if node in inner] if graph is not None else []


def _is_like(node: FxNode, weights: FxNode, ctx: PassContext) -> bool:
    value = node.meta["val"]
    is_float = isinstance(value, torch.Tensor) and value.dtype.is_floating_point
    return is_float and ctx.shape(value) == ctx.shape(weights)


def _is_bias(node: FxNode, logits: FxNode, ctx: PassContext) -> bool:
    value = node.meta["val"]
    is_vector = tuple(size for size in value.shape if size != 1) == tuple(tensor(logits).shape[1:])
    return ctx.is_param(node) and value.dtype.is_floating_point and is_vector


# --- comparing ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Draw:
    """Random scores, and what the router makes of them."""

    logits: torch.Tensor
    bias: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor


def _meaning(router: _Router, ctx: PassContext) -> dict[str, Any] | None:
    """The attributes with which `route` does the same as the router, if there are such."""
    num_experts, top_k = tensor(router.logits).shape[1], tensor(router.ids).shape[1]
    dtype = tensor(router.weights).dtype
    if not isinstance(num_experts, int) or not isinstance(top_k, int) or dtype not in _TOLERANCES:
        return None
    try:
        draws = [_draw(router, ctx, logits, _bias(router, seed)) for seed, logits in enumerate(_logits(router))]
    except NotComputable:
        return None
    picked = _topk(router)
    ordered = picked is None or argument(picked, "sorted")  # else they may come in any order
    candidates = ({**candidate, "dtype": dtype} for candidate in _candidates(router, top_k))
    return next((each for each in candidates if all(_agrees(each, draw, ordered=ordered) for draw in draws)), None)


def _logits(router: _Router) -> Iterator[torch.Tensor]:
    """Scores [T, E] of which no row has two equal ones among those that may be chosen."""
    generator = torch.Generator().manual_seed(0)
    num_experts, dtype = tensor(router.logits).shape[1], tensor(router.logits).dtype
    for spread in _SPREADS:
        numbers = (torch.randn(64 * num_experts, generator=generator) * spread).to(dtype).unique()
        if len(numbers) < num_experts:
            raise NotComputable(f"{num_experts} different numbers of {dtype}")
        picks = [torch.randperm(len(numbers), generator=generator)[:num_experts] for _ in range(_TOKENS)]
        yield numbers[torch.stack(picks)]
    for shift in _SHIFTS:
        steps = [torch.randperm(num_experts, generator=generator) for _ in range(_TOKENS)]
        yield (shift - torch.stack(steps)).to(dtype)


def _bias(router: _Router, seed: int) -> torch.Tensor | None:
    """A bias [E] of different numbers: of both signs, all negative, or all positive."""
    if router.bias is None:
        return None
    num_experts = tensor(router.bias).numel()
    order = torch.randperm(num_experts, generator=torch.Generator().manual_seed(seed))
    return (order / num_experts + (-0.4, -2.0, 0.1)[seed % 3]).to(tensor(router.bias).dtype)


def _draw(router: _Router, ctx: PassContext, logits: torch.Tensor, bias: torch.Tensor | None) -> _Draw:
    known: dict[FxNode, Any] = {router.logits: logits}
    if router.bias is not None and bias is not None:
        known[router.bias] = bias.reshape(tensor(router.bias).shape)
    for node in router.inner:
        known |= {source: _size(source, ctx) for source in node.all_input_nodes if _is_size(source)}
    return _Draw(logits, bias, evaluate(router.ids, known, ctx), evaluate(router.weights, known, ctx))


def _size(node: FxNode, ctx: PassContext) -> int:
    """A size of the packed batch, of `_TOKENS` tokens."""
    value = node.meta["val"]
    if isinstance(value, int):
        return value
    if not isinstance(value, torch.SymInt):
        raise NotComputable(node.name)
    try:
        return symbols.evaluate(expr_of(value, ctx.symbols), {"T": _TOKENS})
    except KeyError:
        raise NotComputable(node.name) from None


def _candidates(router: _Router, top_k: int) -> Iterator[dict[str, Any]]:
    """All that the router may mean."""
    choice = {"choice": "logits"} if _ranks_logits(router) else {}
    normalisers = [{"normalise": False}, *({"normalise": True, **known} for known in _denominators(router))]
    for scoring, group, normaliser, scale in itertools.product(SCORINGS, _groups(router), normalisers, _scales(router)):
        yield {"scoring": scoring, "top_k": top_k, **choice, **group, **normaliser, **scale}


def _scales(router: _Router) -> Iterator[dict[str, float]]:
    """By what the weights may be multiplied: nothing, or a number by which the router multiplies."""
    yield {}
    factors = [node.args[1] for node in _ordered(set(router.inner)) if node.target is aten.mul.Tensor]
    numbers = dict.fromkeys(float(factor) for factor in factors if isinstance(factor, (int, float)) and factor != 1)
    yield from ({"scale": number} for number in numbers)


def _topk(router: _Router) -> FxNode | None:
    """The `topk` that picks the ids, if they come from one as they are."""
    picked = router.ids.args[0] if router.ids.target is operator.getitem else None
    return picked if picked is not None and picked.target is aten.topk.default else None


def _ranks_logits(router: _Router) -> bool:
    """Whether the experts are chosen by the logits themselves.

    Scores of large logits round to equal numbers, logits don't: the choices differ where no draw may show it.
    """
    picked = _topk(router)
    if picked is None:
        return False
    ranked: Any = picked.args[0]
    while ranked is not router.logits and ranked.target in (aten.to.dtype, aten.add.Tensor):
        ranked = ranked.args[0]
    return ranked is router.logits


def _groups(router: _Router) -> Iterator[dict[str, Any]]:
    """No groups, and those that a tensor of the router has the shape of: [T, groups, experts of a group]."""
    yield {}
    num_experts, top_k = tensor(router.logits).shape[1], tensor(router.ids).shape[1]
    values = [node.meta["val"] for node in _ordered(set(router.inner))]
    shapes = [value.shape for value in values if isinstance(value, torch.Tensor)]
    counts = {shape[1] for shape in shapes if len(shape) == 3 and shape[1] * shape[2] == num_experts}
    ways = itertools.product(sorted(counts - {1, num_experts}), GROUP_SCORES)
    for num_groups, group_score in ways:
        for top_groups in range(1, num_groups + 1):
            if num_experts // num_groups * top_groups >= top_k:
                yield {"num_groups": num_groups, "top_groups": top_groups, "group_score": group_score}


def _denominators(router: _Router) -> Iterator[dict[str, float]]:
    """What may be done to a sum before it divides: a small constant of the router is added, or a bound, or nothing."""
    for node in _ordered(set(router.inner)):
        if node.target is aten.add.Tensor and isinstance(node.args[1], float) and 0 < node.args[1] < 1e-3:
            yield {"epsilon": node.args[1]}
        if node.target in (aten.clamp.default, aten.clamp_min.default) and 0 < (node.args[1] or 0) < 1e-3:
            yield {"floor": float(node.args[1])}
    yield {}


def _agrees(attributes: dict[str, Any], draw: _Draw, *, ordered: bool) -> bool:
    """Whether the op chooses the router's experts, with its weights.

    Only a router that asks for no order may have another one.
    """
    weights, ids = route(draw.logits, draw.bias, **attributes)
    expected_ids, expected = draw.ids, draw.weights
    if not ordered:
        ids, order = ids.sort(dim=1)
        expected_ids, expected_order = expected_ids.sort(dim=1)
        weights, expected = weights.gather(1, order), expected.gather(1, expected_order)
    is_close = torch.isclose(weights, expected, rtol=_TOLERANCES[attributes["dtype"]], atol=0.0)
    return torch.equal(ids, expected_ids) and bool(is_close.all())
