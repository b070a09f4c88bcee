"""What computes latent attention: over pages Triton on GPUs; else PyTorch, with one of the products of
`precast.kernels.attention.batched` inside."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, floordiv, largest, maximum, minimum, mul
from precast.kernels.attention.limits import TILE
from precast.kernels.attention.workspace import Shape, batched, keys_of, product, queries_of
from precast.kernels.latent_attention import launches
from precast.kernels.latent_attention.launches import FEW_TOKENS, SMALL_STEP
from precast.kernels.latent_attention.limits import MAX_EXPANDED, MAX_LATENT, MAX_ROPE
from precast.kernels.records import Condition, Record, nothing, reference, reference_on_cpu
from precast.kernels.use import Use, numbers


class _Latent(NamedTuple):
    """Heads, and the sizes of the query's parts, the latent and a value; bytes of an element."""

    heads: Expr
    nope: Expr
    rope: Expr
    latent: Expr
    value: Expr
    bytes: int


def _sizes(use: Use, rope: Expr) -> _Latent:
    rows, latent = use.shape("weight")
    heads, query = use.shape("q")[2:]
    value = use.result.shape[3]
    assert rows is not None
    return _Latent(heads, add(query, mul(-1, rope)), rope, latent, value, use.width("q"))


def _packed(use: Use) -> Expr:
    """All latents expanded: product, joined keys, then attention over them."""
    sizes = _sizes(use, use.shape("k_rope")[-1])
    tokens = use.shape("q")[1]
    expanded = mul(tokens, sizes.heads, add(sizes.nope, sizes.value, sizes.nope, sizes.rope), sizes.bytes)
    query = add(sizes.nope, sizes.rope)
    shape = Shape(sizes.heads, sizes.heads, query, sizes.value, sizes.bytes, sizes.bytes, True)
    pairs = mul(tokens, sizes.heads)
    held = product(shape, minimum(tokens, TILE), tokens, pairs, 0)
    return add(expanded, held, mul(64, tokens))


def _paged(use: Use) -> Expr:
    cached = use.shape("cache")
    sizes = _sizes(use, add(cached[2], mul(-1, use.shape("weight")[1])))
    queries = queries_of(use)
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
    """The query in the latents' space, joined with its rope part; what comes out, and its order for the product."""
    tokens = minimum(use.shape("q")[1], mul(use.shape("kv_lens")[0], limit))
    latent, joined = sizes.latent, add(sizes.latent, sizes.rope)
    head = mul(tokens, sizes.heads, sizes.bytes)
    shape = Shape(sizes.heads, 1, joined, latent, sizes.bytes, use.width("cache"), True)
    before = mul(head, add(latent, latent, sizes.nope))
    during = add(mul(head, add(joined, latent)), batched(shape, queries, use.shape("cache")[1], use))
    after = mul(head, add(joined, latent, latent, sizes.value))
    # Where others of the batch are expanded, these are picked out before and put back after.
    expands = minimum(1, maximum(0, add(queries_of(use), mul(-1, limit))))
    mixed = mul(expands, minimum(1, maximum(0, add(use.shape("kv_lens")[0], -1))))
    alone = mul(head, add(sizes.nope, sizes.rope, sizes.value), mixed)
    return add(largest((before, during, after)), alone, mul(32, tokens))


def _expanded(use: Use, sizes: _Latent, queries: Expr) -> Expr:
    """One sequence: its latents gathered; for as many heads as fit their keys and values, which attention gathers and
    orders again."""
    query = add(sizes.nope, sizes.rope)
    _, page_size, cached = use.shape("cache")
    _, keys = keys_of(use, page_size)
    a_key = add(query, sizes.value)
    pairs = minimum(mul(keys, sizes.heads), maximum(keys, floordiv(MAX_EXPANDED, a_key)))
    kept = mul(keys, cached, sizes.bytes + (0 if use.width("cache") == sizes.bytes else use.width("cache")))
    made = mul(pairs, add(sizes.nope, sizes.value, query), sizes.bytes)
    gathered = mul(pairs, a_key, sizes.bytes)
    shape = Shape(sizes.heads, sizes.heads, query, sizes.value, sizes.bytes, sizes.bytes, True)
    held = product(shape, minimum(queries, TILE), keys, pairs, 0)
    head = mul(queries, sizes.heads, sizes.bytes)
    alone = mul(head, query)
    parts = mul(head, sizes.value)
    own = add(alone, largest((add(kept, made, gathered, held, parts), mul(2, parts))))
    return add(own, mul(32, use.shape("q")[1]), mul(16, use.shape("page_indices")[0]))


def _few_elements(use: Use) -> bool:
    latent, both = use.number("weight", 1), use.number("cache", 2)
    known = all(bool(use.number(*size)) for size in (("q", 2), ("q", 3), ("cache", 1)))
    return known and latent is not None and both is not None and latent <= MAX_LATENT and 0 < both - latent <= MAX_ROPE


def _is_positive(x: object) -> bool:
    return isinstance(x, (int, float)) and x > 0


def _written(use: Use) -> Expr:
    """Rows of both parts, joined, rounded, and chosen from; for 8 bits with a saturated copy."""
    made, cached = use.width("latent"), use.width("cache")
    both = add(numbers(use.operands["latent"]), numbers(use.operands["k_rope"]))
    held = 2 * made if cached in (1, made) else made + max(made, cached) + cached
    return add(mul(held, both), mul(64, use.shape("slot_mapping")[0]))


_SAME = Condition("a weight of q's type", lambda use: use.operands["weight"].type.dtype == use.operands["q"].type.dtype)
_FITS = Condition(f"a latent of at most {MAX_LATENT} elements, and {MAX_ROPE} that heads share", _few_elements)
_CONVERTS = Condition(
    "compute capability 8.9 or higher for a cache of 8 bits",
    lambda use: use.width("cache") > 1 or use.target.capability >= (8, 9),
)

_SCALES = Condition("a scale above 0", lambda use: _is_positive(use.constant("scale")))
_KNOWN = Condition(
    "latents, and a part that heads share, of known sizes",
    lambda use: all(bool(use.number(*size)) for size in (("latent", 2), ("k_rope", 2), ("cache", 1))),
)
_TRITON: dict[str, Any] = {"kind": "triton", "devices": ("cuda",), "min_capability": (8, 0)}
_PAGED: dict[str, Any] = {
    **_TRITON, "op": "precast.paged_latent_attention", "dtypes": {"q": ("float16", "bfloat16", "float32")},
    "takes": (_SAME, _FITS, _SCALES, _CONVERTS), "allocates": False,
}  # fmt: skip
_SMALL_STEPS = {"few": (0, FEW_TOKENS), "small": (FEW_TOKENS + 1, SMALL_STEP)}
"""By tokens: blocks differ."""

RECORDS = (
    Record(
        name="torch.latent_attention", op="precast.latent_attention", workspace=_packed, control="host",
        runs="precast.kernels.latent_attention.batched:latent_attention",
    ),
    *(
        Record(
            name=f"triton.paged_latent_attention.{name}", **_PAGED, sizes={"T": tokens},
            workspace=partial(launches.held, most_tokens=tokens[1]),
            runs=partial(launches.paged, most_tokens=tokens[1]),
        )
        for name, tokens in _SMALL_STEPS.items()
    ),
    Record(
        name="triton.paged_latent_attention", **_PAGED,
        workspace=partial(launches.held, most_tokens=None), runs=partial(launches.paged, most_tokens=None),
    ),
    Record(
        name="torch.paged_latent_attention", op="precast.paged_latent_attention", workspace=_paged, control="host",
        runs="precast.kernels.latent_attention.batched:paged_latent_attention",
    ),
    reference_on_cpu("precast.latent_attention", "latent_attention.latent_attention"),
    reference_on_cpu("precast.paged_latent_attention", "latent_attention.paged"),
    Record(
        name="triton.write_latent", op="precast.write_latent", **_TRITON, takes=(_KNOWN, _CONVERTS), allocates=False,
        workspace=nothing, runs=launches.write_latent,
    ),
    reference("precast.write_latent", "latent_attention.write_latent", _written),
)  # fmt: skip
