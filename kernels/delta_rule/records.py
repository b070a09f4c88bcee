"""What computes delta rules: Triton token by token on GPUs; else chunks with a triangular system each."""

from __future__ import annotations

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, minimum, mul
from precast.kernels.linear_attention.limits import CHUNK, ROWWISE_CHUNK
from precast.kernels.linear_attention.workspace import has_rowwise_decay, looped
from precast.kernels.records import nothing
from precast.kernels.stateful.form_records import Stage, copy_bytes, form_records, padded_tokens, staged
from precast.kernels.use import Use, wide


def _delta_rule(use: Use) -> Expr:
    """Normalised and repeated queries and keys, their chunks, and the triangular system with both its sides."""
    full = wide(use.operands["v"])
    (_, tokens, heads, value), inner = use.shape("v"), use.shape("q")[3]
    rowwise = has_rowwise_decay(use)
    chunk = ROWWISE_CHUNK if rowwise else CHUNK
    rows = minimum(tokens, chunk)
    keys, values, products = mul(full, inner), mul(full, value), mul(full, rows)
    decays: Expr = mul(4, keys) if rowwise else 6 * full
    stages = (
        Stage(add(mul(2, keys), values, mul(4, products), decays), 1),
        Stage(add(mul(4, keys), mul(3, values), mul(3, products), decays), 1),
        Stage(add(mul(5, keys), mul(2, values), mul(2, products), decays), 1),
        Stage(add(mul(3, keys), mul(3, values), mul(2, products), decays), looped(tokens, chunk), mul(rows, values)),
        Stage(add(mul(3, keys), mul(4, values), mul(2, products), decays), 2),
    )
    held = mul(heads, add(mul(copy_bytes(use, "v"), value), mul(2, keys)))
    given = mul(2 * copy_bytes(use, "q"), *use.shape("q")[2:])
    scan = staged(use, tokens, heads, chunk, mul(full, heads, inner, value), stages)
    return add(scan, mul(padded_tokens(use, tokens), add(held, given)), mul(64, tokens))


RECORDS = form_records("delta_rule", "chunked", _delta_rule, walked=nothing)
