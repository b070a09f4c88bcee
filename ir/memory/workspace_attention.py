"""The workspace of attention where PyTorch computes it: on CPUs, and of latents on GPUs (`precast.kernels.attention`).

The implementations take sequences with several queries one by one, in blocks of queries, and those with one query
together, padded to less than twice their pages, as many as a constant allows. Of the page lists their total length is
known, and how long a sequence is at most.
"""

from __future__ import annotations

from typing import NamedTuple

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, floordiv, largest, maximum, minimum, mul
from precast.ir.memory.operands import LONGEST, Row, Use

_BLOCK = 128
"""Queries that are computed at a time."""
_MAX_GATHERED = 1 << 25
"""Elements of keys and values that sequences with one query gather at a time, if that is one sequence at least."""
_MAX_EXPANDED = 1 << 27
"""Elements of expanded keys and values at a time."""


class _Shape(NamedTuple):
    """An attention: query heads, heads of keys and values, their sizes; bytes of an element and of a cached one."""

    heads: Expr
    kv_heads: Expr
    size: Expr
    value: Expr
    bytes: int
    cached: int
    plain: bool  # no sinks, slopes or soft cap


def _shape(use: Use, keys: str, values: str) -> _Shape:
    heads, kv_heads = use.shape("q")[2], use.shape(keys)[2]
    plain = not (use.has("sinks") or use.has("slopes") or use.constant("soft_cap") is not None)
    return _Shape(heads, kv_heads, use.shape("q")[3], use.shape(values)[3], use.width("q"), use.width(keys), plain)


def _queries(use: Use) -> Expr:
    """Queries of one sequence, of which each has one at least."""
    tokens, sequences = use.shape("q")[1], use.shape("kv_lens")[0]
    return maximum(1, add(tokens, mul(-1, sequences), 1))


def _keys(use: Use, page_size: Expr) -> tuple[Expr, Expr]:
    """Slots of all page lists, and of the longest one."""
    keys = mul(use.shape("page_indices")[0], page_size)
    return keys, minimum(keys, add(LONGEST, page_size))


def _paged(use: Use) -> Expr:
    if use.device == "cuda" and use.operands["q"].type.dtype != "float64":
        return 0
    return _batched(_shape(use, "k_cache", "v_cache"), _queries(use), use.shape("k_cache")[1], use)


def _batched(shape: _Shape, queries: Expr, page_size: Expr, use: Use) -> Expr:
    """Sequences with up to `queries` queries each, over pages of `page_size` slots."""
    sequences, tokens = use.shape("kv_lens")[0], use.shape("q")[1]
    keys, longest = _keys(use, page_size)
    row = mul(shape.kv_heads, add(shape.size, shape.value))
    rounded = 0 if shape.cached == shape.bytes else shape.bytes
    pairs = mul(longest, shape.kv_heads)
    product = _product(shape, minimum(queries, _BLOCK), longest, pairs, use.device, rounded)
    one = add(mul(longest, row, shape.cached), product)
    at_a_time = maximum(longest, floordiv(_MAX_GATHERED, row))
    padded = minimum(mul(2, keys), mul(sequences, longest), at_a_time)
    gathered = mul(padded, add(mul(row, shape.cached + rounded), 24))
    batch = sequences
    if use.constant("window") is None and use.constant("chunk") is None:
        # Others have the keys that are not gathered, and none of them has more than the longest.
        others = floordiv(maximum(0, add(keys, mul(-1, at_a_time))), maximum(1, longest))
        batch = maximum(1, add(sequences, mul(-1, others)))
    together = add(gathered, _product(shape, batch, padded, mul(padded, shape.kv_heads), use.device, 0, page_size))
    several = minimum(1, maximum(0, add(queries, -1)))
    return add(
        largest((mul(several, one), together)), mul(64, sequences), mul(16, use.shape("page_indices")[0]), tokens
    )


def _packed(use: Use) -> Expr:
    """Without a cache: each sequence over its own tokens, in blocks of queries."""
    if use.device == "cuda" and use.operands["q"].type.dtype != "float64":
        return mul(16, use.shape("q")[1])
    tokens = use.shape("q")[1]
    shape = _shape(use, "k", "v")
    return _product(shape, minimum(tokens, _BLOCK), tokens, mul(tokens, shape.kv_heads), use.device, 0)


def _product(
    shape: _Shape, queries: Expr, keys: Expr, pairs: Expr, device: str, rounded: int, page_size: Expr = 0
) -> Expr:
    """Queries, keys, values and masks as the product wants them, what it holds itself, and its result.

    `queries` of one sequence, or with a `page_size` of as many sequences that decode, over whole pages. `keys` counts
    those of all sequences, `pairs` those of all heads; `rounded`: bytes of keys and values in the query's type.
    """
    rows = mul(queries, shape.heads)
    decodes = page_size != 0
    each = 1 if decodes else queries
    masks = mul(each, keys)
    group = 1 if shape.heads == shape.kv_heads else shape.heads if shape.kv_heads == 1 else _quotient(shape)
    sizes = add(shape.size, shape.value)
    kv = mul(pairs, sizes)
    scores = mul(each, pairs, group)
    ends = mul(rows, shape.bytes, add(shape.size, shape.value, shape.value))
    seen = mul(masks, add(2, group))
    distances = mul(masks, 11)
    if not shape.plain:
        return add(ends, mul(4, rows, sizes), seen, mul(15, scores), mul(4 + rounded, kv), mul(24, keys))
    if device == "cuda":
        # The queries of one sequence for one key head are rows as they lie.
        is_view = shape.kv_heads == 1 and not decodes
        turned = 0 if is_view else mul(rows, shape.bytes, shape.size)
        copies = 0 if shape.kv_heads == 1 else shape.bytes
        # The kernel adds up in float32; its mask of numbers is padded to a multiple of 8 columns.
        inner = mul(rows, shape.bytes + (4 if shape.bytes < 4 else 0), shape.value)
        is_padded = not (decodes and isinstance(page_size, int) and page_size % 8 == 0)
        mask = mul((2 if is_padded else 1) * shape.bytes, masks, group)
        result = largest((add(inner, mask), mul(2 * shape.bytes, rows, shape.value)))
        return add(turned, largest((add(seen, mul(copies + rounded, kv), result), distances)))
    if shape.size == shape.value:
        inner = add(mul(rounded, kv), mul(shape.bytes, masks, group))
    else:
        floats = 8 if shape.bytes < 4 else shape.bytes
        inner = add(mul(floats + rounded, kv), mul(9, scores), mul(8, rows, sizes))
    return add(ends, largest((add(seen, inner), distances)))


def _quotient(shape: _Shape) -> Expr:
    return floordiv(shape.heads, shape.kv_heads)


class _Latent(NamedTuple):
    heads: Expr
    nope: Expr
    rope: Expr
    latent: Expr
    value: Expr
    bytes: int


def _latent(use: Use, rope: Expr) -> _Latent:
    rows, latent = use.shape("weight")
    heads, query = use.shape("q")[2:]
    value = use.result.shape[3]
    assert rows is not None
    return _Latent(heads, add(query, mul(-1, rope)), rope, latent, value, use.width("q"))


def _latent_packed(use: Use) -> Expr:
    """All latents expanded: product, joined keys, then attention over them."""
    sizes = _latent(use, use.shape("k_rope")[-1])
    tokens = use.shape("q")[1]
    expanded = mul(tokens, sizes.heads, add(sizes.nope, sizes.value, sizes.nope, sizes.rope), sizes.bytes)
    query = add(sizes.nope, sizes.rope)
    shape = _Shape(sizes.heads, sizes.heads, query, sizes.value, sizes.bytes, sizes.bytes, True)
    pairs = mul(tokens, sizes.heads)
    product = _product(shape, minimum(tokens, _BLOCK), tokens, pairs, use.device, 0)
    return add(expanded, product, mul(64, tokens))


def _latent_paged(use: Use) -> Expr:
    cached = use.shape("cache")
    sizes = _latent(use, add(cached[2], mul(-1, use.shape("weight")[1])))
    queries = _queries(use)
    made = add(sizes.nope, sizes.value)
    # With so many queries a sequence is cheaper absorbed (`precast.kernels.latent_attention.batched`).
    saved = add(mul(2, sizes.latent), mul(-1, made))
    limit = floordiv(mul(sizes.latent, made), saved) if isinstance(saved, int) and saved > 0 else queries
    absorbed = _absorbed(use, sizes, minimum(queries, limit), limit)
    if limit == queries:
        return absorbed
    expands = minimum(1, maximum(0, add(queries, mul(-1, limit))))
    return largest((absorbed, mul(expands, _expanded(use, sizes, queries))))


def _absorbed(use: Use, sizes: _Latent, queries: Expr, limit: Expr) -> Expr:
    """The query in the latents' space, joined with its rope part; what comes out, and its order for the product.

    A CPU's product of batches copies the weight's part.
    """
    tokens = minimum(use.shape("q")[1], mul(use.shape("kv_lens")[0], limit))
    latent, joined = sizes.latent, add(sizes.latent, sizes.rope)
    head = mul(tokens, sizes.heads, sizes.bytes)
    shape = _Shape(sizes.heads, 1, joined, latent, sizes.bytes, use.width("cache"), True)
    turned = mul(use.width("weight"), *use.shape("weight")) if use.device == "cpu" else 0
    before = add(mul(head, add(latent, latent, sizes.nope)), turned)
    during = add(mul(head, add(joined, latent)), _batched(shape, queries, use.shape("cache")[1], use))
    after = add(mul(head, add(joined, latent, latent, sizes.value)), turned)
    # Where others of the batch are expanded, these are picked out before and put back after.
    expands = minimum(1, maximum(0, add(_queries(use), mul(-1, limit))))
    mixed = mul(expands, minimum(1, maximum(0, add(use.shape("kv_lens")[0], -1))))
    alone = mul(head, add(sizes.nope, sizes.rope, sizes.value), mixed)
    return add(largest((before, during, after)), alone, mul(32, tokens))


def _expanded(use: Use, sizes: _Latent, queries: Expr) -> Expr:
    """One sequence: its latents gathered; for as many heads as fit their keys and values, which attention gathers and
    orders again."""
    query = add(sizes.nope, sizes.rope)
    _, page_size, cached = use.shape("cache")
    _, keys = _keys(use, page_size)
    a_key = add(query, sizes.value)
    pairs = minimum(mul(keys, sizes.heads), maximum(keys, floordiv(_MAX_EXPANDED, a_key)))
    kept = mul(keys, cached, sizes.bytes + (0 if use.width("cache") == sizes.bytes else use.width("cache")))
    made = mul(pairs, add(sizes.nope, sizes.value, query), sizes.bytes)
    gathered = mul(pairs, a_key, sizes.bytes)
    shape = _Shape(sizes.heads, sizes.heads, query, sizes.value, sizes.bytes, sizes.bytes, True)
    product = _product(shape, minimum(queries, _BLOCK), keys, pairs, use.device, 0)
    head = mul(queries, sizes.heads, sizes.bytes)
    alone = mul(head, query)
    parts = mul(head, sizes.value)
    own = add(alone, largest((add(kept, made, gathered, product, parts), mul(2, parts))))
    return add(own, mul(32, use.shape("q")[1]), mul(16, use.shape("page_indices")[0]))


ROWS: dict[str, Row] = {
    "precast.attention": _packed,
    "precast.paged_attention": _paged,
    "precast.latent_attention": _latent_packed,
    "precast.paged_latent_attention": _latent_paged,
}
