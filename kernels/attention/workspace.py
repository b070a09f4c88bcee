"""What attention in PyTorch holds on a GPU (`precast.kernels.attention.batched`); latent attention holds it too.

The implementations take sequences with several queries one by one, in tiles of queries, and those with one query
together, padded to less than twice their pages, as many as a constant allows. Of the page lists their total length is
known, and how long a sequence is at most.
"""

from __future__ import annotations

from typing import NamedTuple

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, floordiv, largest, maximum, minimum, mul
from precast.kernels.attention.limits import MAX_GATHERED, TILE
from precast.kernels.use import LONGEST, Use


class Shape(NamedTuple):
    """An attention: query heads, heads of keys and values, their sizes; bytes of an element and of a cached one."""

    heads: Expr
    kv_heads: Expr
    size: Expr
    value: Expr
    bytes: int
    cached: int
    plain: bool  # no sinks, slopes, bias or soft cap
    biased: bool = False


def _shape(use: Use, keys: str, values: str) -> Shape:
    heads, kv_heads = use.shape("q")[2], use.shape(keys)[2]
    is_biased = use.has("bias")
    plain = not (is_biased or use.has("sinks") or use.has("slopes") or use.constant("soft_cap") is not None)
    return Shape(
        heads, kv_heads, use.shape("q")[3], use.shape(values)[3], use.width("q"), use.width(keys), plain, is_biased
    )


def queries_of(use: Use) -> Expr:
    """Queries of one sequence, of which each has one at least."""
    tokens, sequences = use.shape("q")[1], use.shape("kv_lens")[0]
    return maximum(1, add(tokens, mul(-1, sequences), 1))


def keys_of(use: Use, page_size: Expr) -> tuple[Expr, Expr]:
    """Slots of all page lists, and of the longest one."""
    keys = mul(use.shape("page_indices")[0], page_size)
    return keys, minimum(keys, add(LONGEST, page_size))


def paged(use: Use) -> Expr:
    """Over the pages of a cache."""
    return batched(_shape(use, "k_cache", "v_cache"), queries_of(use), use.shape("k_cache")[1], use)


def batched(shape: Shape, queries: Expr, page_size: Expr, use: Use) -> Expr:
    """Sequences with up to `queries` queries each, over pages of `page_size` slots."""
    sequences, tokens = use.shape("kv_lens")[0], use.shape("q")[1]
    keys, longest = keys_of(use, page_size)
    row = mul(shape.kv_heads, add(shape.size, shape.value))
    rounded = 0 if shape.cached == shape.bytes else shape.bytes
    pairs = mul(longest, shape.kv_heads)
    one_by_one = product(shape, minimum(queries, TILE), longest, pairs, rounded)
    one = add(mul(longest, row, shape.cached), one_by_one)
    at_a_time = maximum(longest, floordiv(MAX_GATHERED, row))
    padded = minimum(mul(2, keys), mul(sequences, longest), at_a_time)
    gathered = mul(padded, add(mul(row, shape.cached + rounded), 24))
    batch = sequences
    if use.constant("window") is None and use.constant("chunk") is None:
        # Others have the keys that are not gathered, and none of them has more than the longest.
        others = floordiv(maximum(0, add(keys, mul(-1, at_a_time))), maximum(1, longest))
        batch = maximum(1, add(sequences, mul(-1, others)))
    together = add(gathered, product(shape, batch, padded, mul(padded, shape.kv_heads), 0, page_size))
    several = minimum(1, maximum(0, add(queries, -1)))
    return add(
        largest((mul(several, one), together)), mul(64, sequences), mul(16, use.shape("page_indices")[0]), tokens
    )


def packed(use: Use) -> Expr:
    """Without a cache: each sequence over its own tokens, in tiles of queries."""
    tokens = use.shape("q")[1]
    shape = _shape(use, "k", "v")
    return product(shape, minimum(tokens, TILE), tokens, mul(tokens, shape.kv_heads), 0)


def product(shape: Shape, queries: Expr, keys: Expr, pairs: Expr, rounded: int, page_size: Expr = 0) -> Expr:
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
        # A bias is looked up for each score by an index of 8 bytes, widened, and zero where it says nothing.
        bias = mul(24, scores) if shape.biased else 0
        return add(bias, ends, mul(4, rows, sizes), seen, mul(15, scores), mul(4 + rounded, kv), mul(24, keys))
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


def _quotient(shape: Shape) -> Expr:
    return floordiv(shape.heads, shape.kv_heads)
