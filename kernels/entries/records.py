"""What computes attention over entries: over pages Triton on GPUs; else the definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, ceildiv, maximum, minimum, mul
from precast.kernels.attention.workspace import keys_of
from precast.kernels.entries import launches
from precast.kernels.entries.limits import MAX_ENTRIES, MAX_SCORES, MAX_SIZE
from precast.kernels.records import Condition, Record, nothing, reference
from precast.kernels.sparse_attention import launches as selection_launches
from precast.kernels.sparse_attention import limits as selection
from precast.kernels.sparse_attention.records import CONVERTS, SCORES, selections
from precast.kernels.use import Use, copied, numbers, wide


def _attended(use: Use, entries: Expr, kept: str) -> Expr:
    """A sequence's entries, gathered and widened; for some queries at a time scores, their copies and shares, and the
    entries that each has selected; the queries, widened, and the results of a sequence."""
    tokens, heads, size = use.shape("q")[1:]
    width = wide(use.operands["q"])
    own: Expr = 0
    if use.has("selected"):
        count = use.shape("selected")[2]
        gathered = minimum(mul(tokens, count, size), maximum(MAX_ENTRIES, mul(count, size)))
        own = mul(gathered, width + 2 * use.width(kept))
        pairs = minimum(mul(tokens, heads, count), mul(heads, maximum(count, ceildiv(MAX_ENTRIES, size))))
        seen = minimum(mul(tokens, count), maximum(count, ceildiv(MAX_ENTRIES, size)))
    else:
        pairs = minimum(mul(tokens, heads, entries), maximum(MAX_SCORES, mul(heads, entries)))
        seen = minimum(mul(tokens, entries), maximum(MAX_SCORES, entries))
    kept_bytes = mul(entries, size, width + 2 * use.width(kept))
    queries = mul(add(copied(use.operands["q"]), 2 * width), numbers(use.operands["q"]))
    return add(own, mul(4 * width, pairs), mul(40, seen), kept_bytes, queries, mul(64, tokens))


def _selected(use: Use, entries: Expr, kept: str) -> Expr:
    """As of `select_keys`: every head's scores of a sequence's entries, for some queries at a time; what sorts them;
    the entries, gathered and widened."""
    tokens, heads, size = use.shape("q")[1:]
    width = wide(use.operands["q"])
    pairs = minimum(mul(tokens, heads, entries), maximum(selection.MAX_SCORES, mul(heads, entries)))
    rows = minimum(mul(tokens, entries), maximum(selection.MAX_SCORES, entries))
    kept_bytes = mul(entries, size, 2 * width + use.width(kept))
    queries = mul(copied(use.operands["q"]), numbers(use.operands["q"]))
    return add(mul(3 * width, pairs), mul(48 + 2 * width, rows), kept_bytes, queries, mul(64, tokens))


def _held(use: Use) -> Expr:
    """Entries of the longest sequence of a step, by its pages."""
    return keys_of(use, use.shape("cache")[1])[1]


def _packed(use: Use) -> Expr:
    """Entries of a sequence that has all tokens of a step."""
    rate = use.constant("rate")
    assert isinstance(rate, int), "rate is a number"
    return ceildiv(use.shape("q")[1], rate)


def _written(use: Use) -> Expr:
    """Rows of entries, chosen, rounded, and chosen from; for 8 bits with a saturated copy."""
    made, cached = use.width("entries"), use.width("cache")
    held = 2 * made if cached in (1, made) else made + max(made, cached) + cached
    return add(mul(held, numbers(use.operands["entries"])), mul(96, use.shape("slot_mapping")[0]))


def _reference(op: str, workspace: Callable[[Use], Expr]) -> Record:
    """An op's definition, which walks over sequences on the host."""
    return msgspec.structs.replace(reference(f"precast.{op}", f"entries.{op}", workspace), control="host")


def _known_sizes(use: Use) -> bool:
    heads, size, page = (use.number(*axis) or 0 for axis in (("q", 2), ("q", 3), ("cache", 1)))
    is_known = not use.has("selected") or bool(use.number("selected", 2))
    return heads > 0 and 0 < size <= MAX_SIZE and page > 0 and is_known


_FITS = Condition(f"entries of at most {MAX_SIZE} elements", _known_sizes)
_KNOWN = Condition(
    "entries of known sizes", lambda use: bool(use.number("entries", 2)) and bool(use.number("cache", 1))
)
_TRITON: dict[str, Any] = {"kind": "triton", "devices": ("cuda",), "min_capability": (8, 0), "allocates": False}
_COMPUTED: dict[str, Any] = {"dtypes": {"q": ("float16", "bfloat16", "float32")}}

RECORDS = (
    Record(
        name="triton.paged_entry_attention", op="precast.paged_entry_attention", **_TRITON, **_COMPUTED,
        takes=(_FITS, CONVERTS), workspace=launches.attend_workspace, runs=launches.attend,
    ),
    *selections("paged_select_entries"),
    Record(
        name="triton.paged_select_entries", op="precast.paged_select_entries", **_TRITON, **_COMPUTED,
        takes=(SCORES, CONVERTS), workspace=selection_launches.select_workspace, runs=selection_launches.select_keys,
    ),
    Record(
        name="triton.write_entries", op="precast.write_entries", **_TRITON, takes=(_KNOWN, CONVERTS),
        workspace=nothing, runs=launches.write_entries,
    ),
    reference("precast.write_entries", "entries.write_entries", _written),
    _reference("entry_attention", lambda use: _attended(use, _packed(use), "entries")),
    _reference("paged_entry_attention", lambda use: _attended(use, _held(use), "cache")),
    _reference("select_entries", lambda use: _selected(use, _packed(use), "entries")),
    _reference("paged_select_entries", lambda use: _selected(use, _held(use), "cache")),
)  # fmt: skip
