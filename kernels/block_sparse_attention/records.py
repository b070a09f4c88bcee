"""What computes attention to selected blocks: the definitions, which walk over sequences on the host."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, floordiv, maximum, minimum, mul
from precast.kernels.attention.workspace import keys_of
from precast.kernels.block_sparse_attention.limits import MAX_SCORES
from precast.kernels.records import Record, reference
from precast.kernels.use import Use, copied, numbers, wide


def _selected(use: Use, keys: Expr, kept: str) -> Expr:
    """A sequence's keys, gathered and widened; every head's scores of them for some queries at a time, beside their
    copy in whole blocks; and what sorts the blocks' ones."""
    tokens, heads, size = use.shape("q")[1:]
    width = wide(use.operands["q"])
    pairs = _at_a_time(mul(tokens, heads), heads, keys)
    gathered = mul(keys, size, 2 * width + 2 * use.width(kept))
    queries = mul(copied(use.operands["q"]), numbers(use.operands["q"]))
    return add(mul(2 * width, pairs), mul(40, _blocks(use, pairs)), gathered, queries, mul(64, tokens))


def _attended(use: Use, keys: Expr, kept: tuple[str, str]) -> Expr:
    """A sequence's keys and values, gathered and widened; some queries' scores and shares of them, and which they
    see."""
    tokens, heads = use.shape("q")[1:3]
    width = wide(use.operands["q"])
    pairs = _at_a_time(mul(tokens, heads), heads, keys)
    row = add(*(mul(*use.shape(name)[2:], 2 * width + 2 * use.width(name)) for name in kept))
    result = mul(2 * width, tokens, heads, use.shape(kept[1])[3])
    queries = mul(copied(use.operands["q"]) + width, numbers(use.operands["q"]))
    return add(mul(keys, row), mul(5 * width + 2, pairs), mul(16, keys), result, queries, mul(64, tokens))


def _at_a_time(rows: Expr, heads: Expr, keys: Expr) -> Expr:
    """Pairs of a head's query and a key, of so many `rows`, for some queries at a time."""
    return minimum(mul(rows, keys), maximum(MAX_SCORES, mul(heads, keys)))


def _blocks(use: Use, pairs: Expr) -> Expr:
    """No more blocks than pairs of a query and a key, and where blocks are large far fewer."""
    size = use.constant("block_size")
    assert isinstance(size, int), "the signature says so"
    return add(floordiv(pairs, size), mul(*use.shape("q")[1:3]))


def _longest(use: Use, cache: str) -> Expr:
    """Keys of the longest sequence of a step, by its pages."""
    return keys_of(use, use.shape(cache)[1])[1]


def _reference(op: str, workspace: Callable[[Use], Expr]) -> Record:
    made = reference(f"precast.{op}", f"block_sparse_attention.{op}", workspace)
    return msgspec.structs.replace(made, control="host")


RECORDS = (
    _reference("paged_select_blocks", lambda use: _selected(use, _longest(use, "cache"), "cache")),
    _reference("select_blocks", lambda use: _selected(use, use.shape("q")[1], "k")),
    _reference(
        "paged_block_sparse_attention", lambda use: _attended(use, _longest(use, "k_cache"), ("k_cache", "v_cache"))
    ),
    _reference("block_sparse_attention", lambda use: _attended(use, use.shape("q")[1], ("k", "v"))),
)
