"""What computes attention to selected blocks: over pages Triton on GPUs; else the definitions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, floordiv, maximum, minimum, mul
from precast.kernels.attention.workspace import keys_of
from precast.kernels.block_sparse_attention import launches
from precast.kernels.block_sparse_attention.limits import (
    MAX_COUNT,
    MAX_ROWS,
    MAX_SCORED_SIZE,
    MAX_SCORES,
    MAX_SELECTED,
    MAX_SIZE,
)
from precast.kernels.records import Condition, Record, reference
from precast.kernels.use import Use, copied, numbers, wide


def _selected(use: Use, keys: Expr, kept: str) -> Expr:
    """A sequence's keys, gathered and widened; every head's scores of them for some queries at a time; and
    what sorts the blocks' ones."""
    tokens, heads, size = use.shape("q")[1:]
    width = wide(use.operands["q"])
    pairs = _at_a_time(mul(tokens, heads), heads, keys)
    gathered = mul(keys, size, 2 * width + 2 * use.width(kept))
    queries = mul(copied(use.operands["q"]), numbers(use.operands["q"]))
    return add(mul(width + 1, pairs), mul(40, _blocks(use, pairs)), gathered, queries, mul(64, tokens))


def _attended(use: Use, keys: Expr, kept: tuple[str, str]) -> Expr:
    """A sequence's keys and values, gathered and widened; some queries' scores and shares of them, and which they
    see, by copies of what is selected."""
    tokens, heads = use.shape("q")[1:3]
    width = wide(use.operands["q"])
    pairs = _at_a_time(mul(tokens, heads), heads, keys)
    row = add(*(mul(*use.shape(name)[2:], 2 * width + 2 * use.width(name)) for name in kept))
    result = mul(2 * width, tokens, heads, use.shape(kept[1])[3])
    queries = mul(copied(use.operands["q"]) + width, numbers(use.operands["q"]))
    groups, count = use.shape("selected")[2:]
    chosen = mul(48, tokens, groups, add(count, 1))
    return add(mul(keys, row), mul(5 * width + 2, pairs), mul(16, keys), result, queries, mul(64, tokens), chosen)


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


def _few_heads(use: Use) -> bool:
    heads, size = use.number("q", 2) or 0, use.number("q", 3) or 0
    return bool(use.number("cache", 1)) and 0 < heads <= MAX_ROWS and 0 < size <= MAX_SCORED_SIZE


def _known_heads(use: Use) -> bool:
    """Heads of a unit share a key head and a selection: one of both is divided by the other."""
    heads, kv_heads, groups = (use.number(*axis) or 0 for axis in (("q", 2), ("k_cache", 2), ("selected", 2)))
    if not (heads and kv_heads and groups and use.number("k_cache", 1)):
        return False
    units = max(kv_heads, groups)
    sizes = use.number("q", 3) or 0, use.number("v_cache", 3) or 0
    fits = heads % units == 0 and units % kv_heads == 0 and units % groups == 0 and heads // units <= MAX_ROWS
    return fits and all(0 < size <= MAX_SIZE for size in sizes)


def _converts(cache: str) -> Condition:
    return Condition(
        "compute capability 8.9 or higher for a cache of 8 bits",
        lambda use: use.width(cache) > 1 or use.target.capability >= (8, 9),
    )


_SCORED = Condition(f"at most {MAX_ROWS} heads of at most {MAX_SCORED_SIZE} elements", _few_heads)
_COUNTED = Condition(
    f"at most {MAX_COUNT} blocks", lambda use: isinstance(n := use.constant("count"), int) and n <= MAX_COUNT
)
_SELECTED = Condition(
    f"at most {MAX_SELECTED} blocks", lambda use: 0 < (use.number("selected", 3) or 0) <= MAX_SELECTED
)
_HEADS = Condition(
    f"heads of at most {MAX_SIZE} elements, at most {MAX_ROWS} of which share a key head and what is selected",
    _known_heads,
)
_TRITON: dict[str, Any] = {
    "kind": "triton", "devices": ("cuda",), "min_capability": (8, 0), "allocates": False,
    "dtypes": {"q": ("float16", "bfloat16", "float32")},
}  # fmt: skip
_STEPS: dict[str, Any] = {".small": {"T": (0, launches.SMALL_STEP)}, "": {}}
"""By tokens: a few have their blocks scored in parts."""

RECORDS = (
    *(
        Record(
            name=f"triton.paged_select_blocks{name}", op="precast.paged_select_blocks", **_TRITON, sizes=sizes,
            takes=(_SCORED, _COUNTED, _converts("cache")),
            workspace=partial(launches.select_workspace, is_small=bool(name)),
            runs=partial(launches.select_blocks, is_small=bool(name)),
        )
        for name, sizes in _STEPS.items()
    ),
    Record(
        name="triton.paged_block_sparse_attention", op="precast.paged_block_sparse_attention", **_TRITON,
        takes=(_HEADS, _SELECTED, _converts("k_cache")), workspace=launches.attend_workspace, runs=launches.attend,
    ),
    _reference("paged_select_blocks", lambda use: _selected(use, _longest(use, "cache"), "cache")),
    _reference("select_blocks", lambda use: _selected(use, use.shape("q")[1], "k")),
    _reference(
        "paged_block_sparse_attention", lambda use: _attended(use, _longest(use, "k_cache"), ("k_cache", "v_cache"))
    ),
    _reference("block_sparse_attention", lambda use: _attended(use, use.shape("q")[1], ("k", "v"))),
)  # fmt: skip
