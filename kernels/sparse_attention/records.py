"""What computes sparse attention: over pages Triton on GPUs; else the definitions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, maximum, minimum, mul
from precast.kernels.attention.workspace import keys_of
from precast.kernels.latent_attention.limits import MAX_LATENT, MAX_ROPE
from precast.kernels.records import Condition, Record, nothing, reference
from precast.kernels.sparse_attention import attention, launches, selection
from precast.kernels.sparse_attention.limits import MAX_HEADS, MAX_LATENTS, MAX_SCORES, MAX_SIZE
from precast.kernels.use import Use, copied, numbers, wide


def _selected(use: Use, keys: Expr, kept: str) -> Expr:
    """Every head's scores of a sequence's keys, for some queries at a time: the products, and their copy by the scale;
    what sorts them; the keys, gathered and widened."""
    size = use.shape(kept)[2]
    tokens, heads = use.shape("q")[1:3]
    width = wide(use.operands["q"])
    pairs = minimum(mul(tokens, heads, keys), maximum(MAX_SCORES, mul(heads, keys)))
    rows = minimum(mul(tokens, keys), maximum(MAX_SCORES, keys))
    gathered = mul(keys, size, 2 * width + use.width(kept))
    queries = mul(copied(use.operands["q"]), numbers(use.operands["q"]))
    return add(mul(3 * width, pairs), mul(48 + 2 * width, rows), gathered, queries, mul(64, tokens))


def _attended(use: Use, keys: Expr, kept: str, cached: Expr) -> Expr:
    """A sequence's latents, gathered; some queries' own ones of them, widened; scores and shares of these; and the
    queries and results in the latents' space."""
    tokens, heads, query = use.shape("q")[1:]
    selected, latent = use.shape("selected")[2], use.shape("weight")[1]
    width = wide(use.operands["q"])
    entries = minimum(mul(tokens, selected), maximum(MAX_LATENTS, selected))
    own = mul(entries, add(mul(add(cached, latent), width + use.width(kept)), 40))
    scores = mul(4 * width, heads, entries)
    heads_of_all = mul(width, tokens, heads, add(mul(4, latent), mul(2, query), cached))
    weights = mul(copied(use.operands["weight"]), numbers(use.operands["weight"]))
    return add(mul(2 * use.width(kept), keys, cached), own, scores, heads_of_all, weights, mul(64, tokens))


def _longest(use: Use) -> Expr:
    """Keys of the longest sequence of a step, by its pages."""
    return keys_of(use, use.shape("cache")[1])[1]


def _written(use: Use) -> Expr:
    """Rows of keys, chosen, rounded, and chosen from; for 8 bits with a saturated copy."""
    made, cached = use.width("k"), use.width("cache")
    held = 2 * made if cached in (1, made) else made + max(made, cached) + cached
    return add(mul(held, numbers(use.operands["k"])), mul(64, use.shape("slot_mapping")[0]))


def _reference(op: str, workspace: Callable[[Use], Expr]) -> Record:
    """An op's definition, which walks over sequences on the host."""
    return msgspec.structs.replace(reference(f"precast.{op}", f"sparse_attention.{op}", workspace), control="host")


def _few_elements(use: Use) -> bool:
    latent, both = use.number("weight", 1), use.number("cache", 2)
    known = all(bool(use.number(*size)) for size in (("q", 2), ("q", 3), ("cache", 1), ("selected", 2)))
    return known and latent is not None and both is not None and latent <= MAX_LATENT and 0 < both - latent <= MAX_ROPE


def _few_heads(use: Use) -> bool:
    heads, size = use.number("q", 2), use.number("q", 3)
    return bool(use.number("cache", 1)) and 0 < (heads or 0) <= MAX_HEADS and 0 < (size or 0) <= MAX_SIZE


CONVERTS = Condition(
    "compute capability 8.9 or higher for a cache of 8 bits",
    lambda use: use.width("cache") > 1 or use.target.capability >= (8, 9),
)
"""Of ops with a `cache`."""
_SAME = Condition("a weight of q's type", lambda use: use.operands["weight"].type.dtype == use.operands["q"].type.dtype)
_FITS = Condition(f"a latent of at most {MAX_LATENT} elements, and {MAX_ROPE} that heads share", _few_elements)
SCORES = Condition(f"at most {MAX_HEADS} heads of at most {MAX_SIZE} elements", _few_heads)
"""Of ops that select from a `cache`."""
_KNOWN = Condition("keys of known sizes", lambda use: bool(use.number("k", 2)) and bool(use.number("cache", 1)))
_TRITON: dict[str, Any] = {"kind": "triton", "devices": ("cuda",), "min_capability": (8, 0), "allocates": False}
_COMPUTED: dict[str, Any] = {"dtypes": {"q": ("float16", "bfloat16", "float32")}}
_HOPPER: dict[str, Any] = {
    "kind": "cuda", "devices": ("cuda",), "min_capability": (9, 0), "max_capability": (9, 0), "allocates": False,
    "dtypes": {"q": ("float16", "bfloat16")},
}  # fmt: skip


def selections(op: str) -> tuple[Record, ...]:
    """What selects keys on Hopper: of few tokens, and of any, by slots for sequences."""
    slots = {"some": (0, selection.SOME_SLOTS), "many": (selection.SOME_SLOTS + 1, None)}
    rows = {"some": selection.SOME_ROWS, "many": selection.MANY_ROWS}
    return (
        Record(
            name=f"cuda.{op}.few", op=f"precast.{op}", **_HOPPER, takes=(SCORES, *selection.TAKES),
            sizes={"T": (0, selection.FEW_TOKENS)}, workspace=selection.token_bytes, runs=selection.of_tokens,
        ),
        *(
            Record(
                name=f"cuda.{op}.{name}", op=f"precast.{op}", **_HOPPER,
                takes=(SCORES, *selection.TAKES), sizes={"B": slots[name]},
                workspace=selection.sequence_bytes, runs=partial(selection.of_sequences, how=rows[name]),
            )
            for name in slots
        ),
    )  # fmt: skip


RECORDS = (
    *selections("paged_select_keys"),
    Record(
        name="triton.paged_select_keys", op="precast.paged_select_keys", **_TRITON, **_COMPUTED,
        takes=(SCORES, CONVERTS), workspace=launches.select_workspace, runs=launches.select_keys,
    ),
    *(
        Record(
            name=f"cuda.paged_sparse_latent_attention.to_{tokens[1] or 'any'}",
            op="precast.paged_sparse_latent_attention", **_HOPPER, takes=(_SAME, _FITS, *attention.TAKES),
            sizes={"T": tokens}, workspace=partial(attention.workspace, tokens=tokens[1]),
            runs=partial(attention.launches, tokens=tokens[1]),
        )
        for tokens in attention.ranges()
    ),
    Record(
        name="triton.paged_sparse_latent_attention", op="precast.paged_sparse_latent_attention", **_TRITON, **_COMPUTED,
        takes=(_SAME, _FITS, CONVERTS), workspace=launches.attend_workspace, runs=launches.attend,
    ),
    Record(
        name="triton.write_index_keys", op="precast.write_index_keys", **_TRITON, takes=(_KNOWN, CONVERTS),
        workspace=nothing, runs=launches.write_index_keys,
    ),
    _reference("paged_select_keys", lambda use: _selected(use, _longest(use), "cache")),
    _reference("select_keys", lambda use: _selected(use, use.shape("q")[1], "k")),
    _reference(
        "paged_sparse_latent_attention", lambda use: _attended(use, _longest(use), "cache", use.shape("cache")[2])
    ),
    _reference(
        "sparse_latent_attention",
        lambda use: _attended(use, use.shape("q")[1], "latent", add(use.shape("latent")[2], use.shape("k_rope")[2])),
    ),
    reference("precast.write_index_keys", "sparse_attention.write_index_keys", _written),
)  # fmt: skip
