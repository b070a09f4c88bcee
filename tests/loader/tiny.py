"""A decoder in miniature for tests of the engine: float32, random weights, windowed and full layers, no bundle.

With `state` a recurrence stands before the layers, with `mlp` each has a feed-forward layer, with `tp` heads and
channels are split over ranks. `reference_logits` is the same model in plain torch, without pages, chunks or batches:
the two share their weights only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from graph_parts import ints, node, value

from precast.ir.graph import symbols
from precast.ir.graph.schema import (
    Apply,
    Block,
    CachePlan,
    Call,
    Cast,
    Const,
    DtypeArg,
    Expr,
    Graph,
    Group,
    Node,
    PagedInputs,
    PagedSpec,
    Param,
    Pipeline,
    Pool,
    Read,
    Recipe,
    Ref,
    ShardPlan,
    Slice,
    Slot,
    StateGroup,
    StateSpec,
    Symbol,
    TensorType,
    Value,
    World,
)
from precast.ir.manifest import ModelInfo

HIDDEN, HEADS, KV_HEADS, HEAD, VOCAB = 16, 4, 2, 4, 48
QUERY, KEY = HEADS * HEAD, KV_HEADS * HEAD
CHANNELS = 12
EPS = 1e-6

Groups = dict[str, tuple[int | None, int, str]]
"""By name: window, tokens a page, pool. In a group whose name begins with `chunk` the window is the size of chunks."""

GROUPS: Groups = {"near": (6, 4, "small"), "far": (None, 8, "large")}
"""The window is no multiple of its page size."""
LAYERS = ("near", "far", "near")
"""The group of each layer."""
BOUNDS: Expr = Apply("add", (1, "B"))


class Heads(NamedTuple):
    """Of queries, and of keys and values, on one rank."""

    query: Expr
    kv: Expr


WHOLE = Heads(HEADS, KV_HEADS)
SPLIT = Heads(symbols.floordiv(HEADS, "tp"), symbols.ceildiv(KV_HEADS, "tp"))
"""Over 1, 2 or 4 ranks; each of 4 has a head of keys and values that another one has too."""


def tiny_model(max_seq_len: int = 64, eos: tuple[int, ...] = ()) -> ModelInfo:
    """What the loader must know of the tiny model."""
    return ModelInfo("TinyForCausalLM", "tiny", "float32", VOCAB, max_seq_len, len(LAYERS), 1, eos_token_ids=eos)


def random_weights(seed: int = 0, num_layers: int = len(LAYERS), *, mlp: bool = False) -> dict[str, torch.Tensor]:
    """The params and the constant by name: large enough that the likeliest token depends on the context."""
    made = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=made)

    weights = {"embed": normal(VOCAB, HIDDEN), "head": 0.1 * normal(VOCAB, HIDDEN)}
    for i in range(num_layers):
        weights[f"layers.{i}.norm"] = 1 + 0.1 * normal(HIDDEN)
        for part, rows, columns in (("q", QUERY, HIDDEN), ("k", KEY, HIDDEN), ("v", KEY, HIDDEN), ("o", HIDDEN, QUERY)):
            weights[f"layers.{i}.{part}"] = 0.7 * normal(rows, columns)
    for i in range(num_layers if mlp else 0):
        weights[f"layers.{i}.up"] = 0.7 * normal(CHANNELS, HIDDEN)
        weights[f"layers.{i}.down"] = 0.7 * normal(HIDDEN, CHANNELS)
    weights["inv_freq"] = torch.tensor([1.0, 0.1])
    return weights


def reference_logits(
    weights: dict[str, torch.Tensor],
    token_ids: Sequence[int],
    groups: Groups = GROUPS,
    layers: Sequence[str] = LAYERS,
    *,
    state: bool = False,
) -> torch.Tensor:
    """Logits `[T, VOCAB]` of the whole sequence at once. There are feed-forward layers if they have weights."""
    count = len(token_ids)
    positions = torch.arange(count)
    angles = positions[:, None] * weights["inv_freq"]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def rotated(x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, -1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)

    x = weights["embed"][torch.tensor(list(token_ids))]
    if state:
        sums, held = [], torch.zeros(HIDDEN)
        for one in x:
            held = one.sigmoid() * held + one
            sums.append(held)
        x = x + torch.stack(sums)
    for i, group in enumerate(layers):
        h = normed(x, weights[f"layers.{i}.norm"])
        q = rotated((h @ weights[f"layers.{i}.q"].T).view(count, HEADS, HEAD))
        k = rotated((h @ weights[f"layers.{i}.k"].T).view(count, KV_HEADS, HEAD))
        v = (h @ weights[f"layers.{i}.v"].T).view(count, KV_HEADS, HEAD)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v))
        distance = positions[:, None] - positions
        window, chunk = rule_of(group, groups)
        visible = (distance >= 0) & (distance < (window or count))
        if chunk is not None:
            visible &= positions[:, None] // chunk == positions // chunk
        scores = torch.einsum("qhd,khd->hqk", q, k) * 0.5
        shares = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        x = x + torch.einsum("hqk,khd->qhd", shares, v).reshape(count, QUERY) @ weights[f"layers.{i}.o"].T
        if f"layers.{i}.up" in weights:
            x = x + (x @ weights[f"layers.{i}.up"].T).tanh() @ weights[f"layers.{i}.down"].T
    return x @ weights["head"].T


def reference_answer(
    weights: dict[str, torch.Tensor],
    prompt: Sequence[int],
    max_tokens: int,
    groups: Groups = GROUPS,
    layers: Sequence[str] = LAYERS,
    *,
    state: bool = False,
) -> list[int]:
    """The likeliest tokens, each from the whole sequence computed anew."""
    ids = list(prompt)
    for _ in range(max_tokens):
        ids.append(int(reference_logits(weights, ids, groups, layers, state=state)[-1].argmax()))
    return ids[len(prompt) :]


# --- the graph -------------------------------------------------------------------------------------------------


def tiny_graph(
    groups: Groups | None = None, layers: Sequence[str] = LAYERS, *, state: bool = False, tp: bool = False,
    mlp: bool = False,
) -> Graph:  # fmt: skip
    """The graph of the layers, by default over `near` (window 6) and `far` (full), each with a pool of its own.

    With `tp` its symbols `tp`, `ep` and `rank` are those of up to 4 ranks, and its layers can be two stages.
    """
    heads = SPLIT if tp else WHOLE
    groups = GROUPS if groups is None else groups
    pools = sorted({pool for _, _, pool in groups.values()} | ({"states"} if state else set()))
    inputs = [_value("input_ids", 1, "T", dtype="int64"), _value("positions", 1, "T", dtype="int64"), *_metadata()]
    inputs += [value for name in groups for value in _group_values(name)]
    if state:
        inputs.append(_value("slot_ids", "B", dtype="int32"))
    params = {name: tensor for name, tensor in random_weights(0, len(layers), mlp=mlp).items() if name != "inv_freq"}
    return Graph(
        symbols=(
            *(Symbol(name, 1) for name in ("T", "B", "R")),
            *(Symbol(f"N_{name}") for name in groups),
            *(Symbol(f"P_{pool}") for pool in pools),
            *((Symbol("tp", 1, 4), Symbol("ep", 1, 4), Symbol("rank", 0, 3)) if tp else ()),
        ),
        inputs=(*inputs, _value("logit_rows", "R", dtype="int64")),
        params=tuple(_param(name, tuple(tensor.shape), heads) for name, tensor in params.items()),
        constants=(_value("inv_freq", HEAD // 2),),
        blocks=tuple(_block(name, groups, heads, mlp) for name in groups),
        main=_main(groups, layers, state, mlp),
        outputs={"logits": "logits"},
        caches=CachePlan(
            pools=tuple(Pool(pool, f"P_{pool}") for pool in pools),
            groups=tuple(_group(name, groups, layers, heads) for name in groups),
            states=(_state_group(),) if state else (),
        ),
        shards=_plan(len(layers)) if tp else ShardPlan(),
    )


def _plan(num_layers: int) -> ShardPlan:
    """Up to four ranks, and two stages, the first of one layer."""
    stages = (Pipeline((1, num_layers - 1)),) if num_layers > 1 else ()
    return ShardPlan((World(1), World(2, (1, 2)), World(4, (1, 2, 4))), pipelines=stages)


def _param(name: str, shape: tuple[int, ...], heads: Heads) -> Param:
    """A param, whole or this rank's part of it."""
    recipe: Recipe = Read(name, shape)
    part, sizes = name.rpartition(".")[2], list[Expr](shape)
    kv, kv_first = symbols.mul(HEAD, heads.kv), symbols.mul(HEAD, _first(KV_HEADS))
    query, first, channels = symbols.mul(HEAD, heads.query), symbols.mul(HEAD, _first(HEADS)), _channels(heads)
    of_rank = {
        "q": (0, query, first), "k": (0, kv, kv_first), "v": (0, kv, kv_first),
        "o": (1, query, first), "up": (0, channels, symbols.mul("rank", channels)),
        "down": (1, channels, symbols.mul("rank", channels)),
    }  # fmt: skip
    if heads != WHOLE and part in of_rank:
        dim, sizes[dim], start = of_rank[part]
        recipe = Slice(recipe, dim, start, sizes[dim])
    return Param(name, TensorType("float32", tuple(sizes)), Cast(recipe, "float32"))


def _first(count: int) -> Expr:
    """The first of a rank's share of so many heads."""
    return symbols.floordiv(symbols.mul("rank", count), "tp")


def _channels(heads: Heads) -> Expr:
    """Of a feed-forward layer, on one rank."""
    return CHANNELS if heads == WHOLE else symbols.floordiv(CHANNELS, "tp")


_value = partial(value, dtype="float32")


def _metadata() -> tuple[Value, ...]:
    return (_value("cu_seqlens", BOUNDS, dtype="int32"), _value("kv_lens", "B", dtype="int32"))


def _group_values(name: str) -> tuple[Value, ...]:
    return (
        _value(f"page_indices_{name}", f"N_{name}", dtype="int32"),
        _value(f"page_indptr_{name}", BOUNDS, dtype="int32"),
        _value(f"page_start_{name}", "B", dtype="int32"),
        _value(f"slot_mapping_{name}", "T", dtype="int64"),
    )


def _state_group() -> StateGroup:
    held = _value("mix.state", "P_states", HIDDEN)
    return StateGroup(
        "state", "states", StateSpec("state", (HIDDEN,), "float32"), "slot_ids", (Slot("mix.state", (held,)),)
    )


def _cache_values(slot: str, name: str, groups: Groups, heads: Heads) -> tuple[Value, ...]:
    _, page_size, pool = groups[name]
    return tuple(_value(f"{slot}.{part}", f"P_{pool}", page_size, heads.kv, HEAD) for part in "kv")


def _group(name: str, groups: Groups, layers: Sequence[str], heads: Heads) -> Group:
    _, page_size, pool = groups[name]
    slots = [f"layers.{i}.cache" for i, group in enumerate(layers) if group == name]
    return Group(
        name=name,
        pool=pool,
        spec=PagedSpec(heads.kv, HEAD, HEAD, "float32", page_size, *rule_of(name, groups)),
        inputs=PagedInputs(*(value.name for value in _group_values(name))),
        slots=tuple(Slot(slot, _cache_values(slot, name, groups, heads)) for slot in slots),
    )


def _projected(source: str, weight: str, name: str, size: Expr) -> Node:
    return node("aten.linear.default", _value(name, 1, "T", size), input=Ref(source), weight=Ref(weight))


def _heads(source: str, name: str, heads: Expr) -> Node:
    shape = (1, "T", heads, HEAD)
    return node("aten.reshape.default", _value(name, *shape), self=Ref(source), shape=ints(*shape))


def _rotated(source: str, name: str, heads: Expr) -> Node:
    result = _value(name, 1, "T", heads, HEAD)
    return node("precast.rotary", result, x=Ref(source), cos=Ref("cos"), sin=Ref("sin"), interleaved=Const(False))


def _block(name: str, groups: Groups, heads: Heads, mlp: bool) -> Block:
    """One layer over the cache of group `name`: x [1, T, 16] -> y [1, T, 16]."""
    tables = (_value("cos", 1, "T", HEAD // 2), _value("sin", 1, "T", HEAD // 2))
    query, key = symbols.mul(HEAD, heads.query), symbols.mul(HEAD, heads.kv)
    shapes: tuple[tuple[str, tuple[Expr, ...]], ...] = (
        ("norm", (HIDDEN,)), ("q", (query, HIDDEN)), ("k", (key, HIDDEN)), ("v", (key, HIDDEN)), ("o", (HIDDEN, query)),
    )  # fmt: skip
    shapes += (("up", (_channels(heads), HIDDEN)), ("down", (HIDDEN, _channels(heads)))) if mlp else ()
    summed = node("precast.all_reduce", _value("all", 1, "T", HIDDEN), x=Ref("out"), group=Const("tp"))
    pages = {part: Ref(f"{part}_{name}") for part in ("page_indices", "page_indptr", "page_start")}
    window, chunk = rule_of(name, groups)
    rule = {"window": Const(window)} if chunk is None else {"window": Const(None), "chunk": Const(chunk)}
    norm = {"eps": Const(EPS), "cast_before_scale": Const(True)}
    return Block(
        name=name,
        inputs=(_value("x", 1, "T", HIDDEN), *tables, *_metadata(), *_group_values(name)),
        params=tuple(_value(f"w.{part}", *shape) for part, shape in shapes),
        caches=_cache_values("cache", name, groups, heads),
        nodes=(
            node("precast.rms_norm", _value("h", 1, "T", HIDDEN), x=Ref("x"), weight=Ref("w.norm"), **norm),
            _projected("h", "w.q", "q_flat", query),
            _projected("h", "w.k", "k_flat", key),
            _projected("h", "w.v", "v_flat", key),
            _heads("q_flat", "q_plain", heads.query),
            _heads("k_flat", "k_plain", heads.kv),
            _heads("v_flat", "v", heads.kv),
            _rotated("q_plain", "q", heads.query),
            _rotated("k_plain", "k", heads.kv),
            node("precast.write_kv", k=Ref("k"), v=Ref("v"), k_cache=Ref("cache.k"), v_cache=Ref("cache.v"),
                  slot_mapping=Ref(f"slot_mapping_{name}")),
            node("precast.paged_attention", _value("seen", 1, "T", heads.query, HEAD), q=Ref("q"),
                  k_cache=Ref("cache.k"), v_cache=Ref("cache.v"), sinks=Const(None), cu_seqlens=Ref("cu_seqlens"),
                  kv_lens=Ref("kv_lens"),
                  scale=Const(0.5), **rule, **pages),
            node("aten.reshape.default", _value("flat", 1, "T", query), self=Ref("seen"), shape=ints(1, "T", query)),
            _projected("flat", "w.o", "out", HIDDEN),
            *(() if heads == WHOLE else (summed,)),
            node("aten.add.Tensor", _value("mid" if mlp else "y", 1, "T", HIDDEN), self=Ref("x"),
                  other=Ref("out" if heads == WHOLE else "all")),
            *(_feed_forward(heads) if mlp else ()),
        ),
        outputs=("y",),
    )  # fmt: skip


def _feed_forward(heads: Heads) -> tuple[Node, ...]:
    """y = mid + down(tanh(up(mid)))."""
    summed = node("precast.all_reduce", _value("down_all", 1, "T", HIDDEN), x=Ref("down"), group=Const("tp"))
    return (
        _projected("mid", "w.up", "up", _channels(heads)),
        node("aten.tanh.default", _value("act", 1, "T", _channels(heads)), self=Ref("up")),
        _projected("act", "w.down", "down", HIDDEN),
        *(() if heads == WHOLE else (summed,)),
        node("aten.add.Tensor", _value("y", 1, "T", HIDDEN), self=Ref("mid"),
             other=Ref("down" if heads == WHOLE else "down_all")),
    )  # fmt: skip


def rule_of(name: str, groups: Groups) -> tuple[int | None, int | None]:
    """Window and chunk of a group."""
    size = groups[name][0]
    return (None, size) if name.startswith("chunk") else (size, None)


def _call(i: int, name: str, mlp: bool) -> Call:
    bound = {
        f"w.{part}": f"layers.{i}.{part}" for part in ("norm", "q", "k", "v", "o", *(("up", "down") if mlp else ()))
    }
    bound |= {"x": f"x{i}", "cache.k": f"layers.{i}.cache.k", "cache.v": f"layers.{i}.cache.v"}
    bound |= {same: same for same in ("cos", "sin", *(value.name for value in (*_metadata(), *_group_values(name))))}
    return Call(name, bound, (_value(f"x{i + 1}", 1, "T", HIDDEN),))


def _mixed() -> tuple[Node, ...]:
    """x0 = embedded + h, h[t] = sigmoid(embedded[t]) * h[t - 1] + embedded[t]."""
    shape = (1, "T", HIDDEN)
    metadata = {"slots": Ref("slot_ids"), "cu_seqlens": Ref("cu_seqlens"), "kv_lens": Ref("kv_lens")}
    return (
        node("aten.sigmoid.default", _value("factor", *shape), self=Ref("embedded")),
        node("precast.stateful_linear_recurrence", _value("mixed", *shape), x=Ref("embedded"), factor=Ref("factor"),
              state=Ref("mix.state"), kind=Const("sum"), **metadata),
        node("aten.add.Tensor", _value("x0", *shape), self=Ref("embedded"), other=Ref("mixed")),
    )  # fmt: skip


def _main(groups: Groups, layers: Sequence[str], state: bool, mlp: bool) -> tuple[Node | Call, ...]:
    embedded = _value("embedded" if state else "x0", 1, "T", HIDDEN)
    tables = (_value("cos", 1, "T", HEAD // 2), _value("sin", 1, "T", HEAD // 2))
    return (
        node("precast.rotary_tables", *tables, positions=Ref("positions"), inv_freq=Ref("inv_freq"),
              scale=Const(1.0), dtype=DtypeArg("float32")),
        node("precast.embedding", embedded, ids=Ref("input_ids"), weight=Ref("embed")),
        *(_mixed() if state else ()),
        *(_call(i, name, mlp) for i, name in enumerate(layers)),
        node("precast.gather_rows", _value("wanted", 1, "R", HIDDEN), x=Ref(f"x{len(layers)}"),
              rows=Ref("logit_rows")),
        node("aten.linear.default", _value("logits", 1, "R", VOCAB), input=Ref("wanted"), weight=Ref("head")),
    )  # fmt: skip
