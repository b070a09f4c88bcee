"""The layers of a graph that can be split, by their ops: where each split begins, and in which units.

Names play no part. What has a core of its own (attention, a recurrence, experts) is found by that op; a feed-forward
layer by a product whose input comes, element by element, from another product.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from precast.builder.shard.layouts import Piece, Units
from precast.builder.shard.solve import Function, Spot, System, whole
from precast.ir.graph.infer import references
from precast.ir.graph.schema import Expr, Node, Ref

Attempt = tuple[tuple[Spot, Piece], ...]
"""What is split at first; the rest follows."""


class Layer(NamedTuple):
    """A layer that may be split: its kind, the function and the value that it is found by, ways to split it in order
    of preference, and whether norms in it may gather what they need all of, for each of them."""

    kind: str
    function: str
    value: str
    attempts: tuple[Attempt, ...]
    through_norms: tuple[bool, ...] = (True, True)


def layers(system: System) -> Iterator[Layer]:
    """All layers, those with a core of their own first. What is split already when its turn comes needs no attempt."""
    seed = 0
    for finders in (_CORES, (_convolution,), (_embedding, _head), (_feed_forward,)):
        for function in system.functions.values():
            for step in function.steps:
                for find in finders:
                    if isinstance(step, Node) and (found := find(system, function, step, seed)) is not None:
                        yield found
                        seed += 1


def _attention(system: System, function: Function, node: Node, seed: int) -> Layer | None:
    if node.op not in ("precast.paged_attention", "precast.paged_block_sparse_attention"):
        return None
    heads, keys = _size(function, node.outputs[0].name, 2), _size(function, _name(node, "k_cache"), 2)
    return _shared_heads("attention", function, node, heads, keys, seed)


def _state_space(system: System, function: Function, node: Node, seed: int) -> Layer | None:
    if node.op != "precast.stateful_state_space_scan":
        return None
    heads, groups = _size(function, node.outputs[0].name, 2), _size(function, _name(node, "b"), 2)
    return _shared_heads("state space", function, node, heads, groups, seed)


def _delta_rule(system: System, function: Function, node: Node, seed: int) -> Layer | None:
    if node.op != "precast.stateful_delta_rule":
        return None
    heads, keys = _size(function, node.outputs[0].name, 2), _size(function, _name(node, "q"), 2)
    return _shared_heads("delta rule", function, node, heads, keys, seed)


def _shared_heads(kind: str, function: Function, node: Node, many: int, few: int, seed: int) -> Layer:
    """By single heads, those that several share held more than once where ranks are many; or by the shared ones."""
    counts = (many, few) if 1 < few < many else (many,)
    value = node.outputs[0].name
    spot = ((function.name, value), 2)
    attempts = tuple(((spot, whole(many, Units(count, "tp", count, seed))),) for count in counts)
    return Layer(kind, function.name, value, attempts)


def _single_heads(system: System, function: Function, node: Node, seed: int) -> Layer | None:
    kind = _HEADS.get(node.op)
    if kind is None:
        return None
    value = node.outputs[0].name
    count = _size(function, value, 2)
    spot = ((function.name, value), 2)
    return Layer(kind, function.name, value, (((spot, whole(count, Units(count, "tp", count, seed))),),))


def _entry_attention(system: System, function: Function, node: Node, seed: int) -> Layer | None:
    """By single heads, or by the smallest groups of neighbours that an output projection in groups leaves whole."""
    if node.op != "precast.paged_entry_attention":
        return None
    value = node.outputs[0].name
    heads = _size(function, value, 2)
    spot = ((function.name, value), 2)
    counts = [count for count in range(heads, 0, -1) if heads % count == 0]
    attempts = tuple(((spot, whole(heads, Units(count, "tp", count, seed))),) for count in counts)
    return Layer("entry attention", function.name, value, attempts, through_norms=(True,) * len(counts))


_HEADS = {
    "precast.paged_latent_attention": "latent attention",
    "precast.paged_sparse_latent_attention": "latent attention",
    "precast.stateful_linear_attention": "linear attention",
    "precast.stateful_selective_scan": "selective scan",
    "precast.stateful_linear_recurrence": "linear recurrence",
    "precast.stateful_wkv": "wkv",
}


def _experts(system: System, function: Function, node: Node, seed: int) -> Layer | None:
    if node.op != "precast.experts":
        return None
    down = _name(node, "down")
    experts, inner = _size(function, down, 0), _size(function, down, 2)
    by_expert = ((function.name, down), 0), whole(experts, Units(experts, "ep", experts, seed))
    inside = (function.name, down), 2
    count = inner // _unit(system, inside, whole(inner, Units(inner, "within", inner, seed)))
    within = inside, whole(inner, Units(count, "within", count, seed))
    return Layer("experts", function.name, node.outputs[0].name, ((by_expert, within),))


_CORES = (_attention, _entry_attention, _state_space, _delta_rule, _single_heads, _experts)


def _convolution(system: System, function: Function, node: Node, seed: int) -> Layer | None:
    if node.op != "precast.stateful_causal_conv":
        return None
    value = node.outputs[0].name
    count = _size(function, value, 2)
    spot = ((function.name, value), 2)
    return Layer("convolution", function.name, value, (((spot, whole(count, Units(count, "tp", count, seed))),),))


def _embedding(system: System, function: Function, node: Node, seed: int) -> Layer | None:
    if node.op != "precast.embedding" or function.name or not _are_tokens(function, _name(node, "ids")):
        return None
    weight = _name(node, "weight")
    if function.given.get(weight) != "param" or function.types[weight].dtype == "int64":
        return None  # rows of integers are no parts of a sum
    rows = _size(function, weight, 0)
    spot = (("", weight), 0)
    return Layer("embedding", "", node.outputs[0].name, (((spot, Piece(0, Units(rows, "vocab", rows, seed), 1)),),))


def _are_tokens(function: Function, name: str) -> bool:
    """Whether these are the step's token ids, or made of them alone."""
    makers = {value.name: step for step in function.steps for value in step.outputs}
    waiting, inputs = [name], set()
    while waiting:
        name = waiting.pop()
        step = makers.get(name)
        if step is None:
            inputs.add(name)
        elif isinstance(step, Node):
            waiting += references(step.args)
        else:
            return False
    return inputs == {"input_ids"}


def _head(system: System, function: Function, node: Node, seed: int) -> Layer | None:
    """The output `logits`, whose tokens are split as the embedding's are."""
    logits = system.graph.outputs.get("logits")
    if function.name or logits not in [value.name for value in node.outputs]:
        return None
    shape = function.types[logits].shape
    tokens = shape[-1]
    if not isinstance(tokens, int):
        return None
    spot = (("", logits), len(shape) - 1)
    unit = system.granule(spot, Piece(0, Units(tokens, "vocab", tokens, seed), 1)).least
    if unit == 1 or tokens % unit:
        piece = Piece(0, Units(tokens, "vocab", tokens, _embedded(system, tokens, seed)), 1)
    else:
        piece = whole(tokens, Units(tokens // unit, "vocab", tokens // unit, seed))
    return Layer("head", "", logits, (((spot, piece),),), through_norms=(False,))


def _embedded(system: System, tokens: int, seed: int) -> int:
    """The number of the embedding that is split over so many tokens: a head that is tied to it is split alike."""
    for pieces in system.pieces.values():
        for piece in pieces:
            if piece.units.by == "vocab" and piece.units.count == tokens:
                return piece.units.seed
    return seed


def _feed_forward(system: System, function: Function, node: Node, seed: int) -> Layer | None:
    """By the channels over which its last product sums."""
    if node.op not in ("aten.linear.default", "precast.grouped_linear"):
        return None
    x, weight = _name(node, "input" if node.op == "aten.linear.default" else "x"), _name(node, "weight")
    dim = len(function.types[weight].shape) - 1
    given = function.given.get(weight)
    if given not in ("param", "constant") or system.dims((function.name, weight)):
        return None
    made = {value.name for step in function.steps for value in step.outputs}
    size = _size(function, weight, dim)
    if x not in made:
        return None
    spot = ((function.name, weight), dim)
    count = size // _unit(system, spot, whole(size, Units(size, "tp", size, seed)))
    attempt = ((spot, whole(size, Units(count, "tp", count, seed))),)
    return Layer("feed-forward", function.name, node.outputs[0].name, (attempt, attempt), through_norms=(False, True))


_SELECTING = ("precast.paged_select_keys", "precast.write_index_keys")


def only_for_selection(function: Function) -> frozenset[str]:
    """The values from which nothing is computed but a selection of keys, or its cache."""
    needed, found = set(function.returned), set[str]()
    for step in reversed(function.steps):
        made = {value.name for value in step.outputs}
        if isinstance(step, Node) and step.op in _SELECTING:
            continue
        if made and not made & needed:
            found |= made
        else:
            needed.update(references(step.args) if isinstance(step, Node) else step.args.values())
    return frozenset(found)


def _unit(system: System, spot: Spot, single: Piece) -> int:
    """Neighbours of a dimension, split by `single` elements, that stay together because a checkpoint stores them in one
    block; of a part of one, where two ranks couldn't share whole blocks. 1 where they can't share parts either."""
    size = single.units.count
    unit, least = system.granule(spot, single)
    while size % (2 * unit) and unit % 2 == 0:
        unit //= 2
    return unit if size % (2 * unit) == 0 and unit % least == 0 else 1


def _name(node: Node, arg: str) -> str:
    given = node.args[arg]
    assert isinstance(given, Ref), f"{node.op}: {arg} is a tensor"
    return given.name


def _size(function: Function, name: str, dim: int) -> int:
    size: Expr = function.types[name].shape[dim]
    assert isinstance(size, int), "sizes before the model is split"
    return size
