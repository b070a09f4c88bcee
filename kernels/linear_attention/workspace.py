"""What scans over chunks hold (`precast.kernels.linear_attention.chunks`), in the parts that `staged` adds up."""

from __future__ import annotations

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, maximum, minimum, mul
from precast.kernels.linear_attention.limits import CHUNK, ROWWISE_CHUNK
from precast.kernels.stateful.form_records import Stage
from precast.kernels.use import Use


def chunks(tokens: Expr, inner: Expr, size: Expr, full: int) -> tuple[Stage, ...]:
    """`precast.kernels.linear_attention.chunks.scan`, with one decay a head."""
    chunk = minimum(tokens, CHUNK)
    keys, values, products, decays = mul(full, inner), mul(full, size), mul(full, chunk), 4 * full
    return (
        Stage(add(mul(2, keys), values, mul(3, products), decays), 1),
        Stage(add(mul(4, keys), mul(2, values), products, decays), 1),
        Stage(add(mul(2, keys), mul(2, values), products, decays), looped(tokens, CHUNK), mul(chunk, values)),
        Stage(add(mul(2, keys), mul(3, values), products, decays), 2),
    )


def looped(tokens: Expr, chunk: int) -> Expr:
    """Copies of a state while one chunk follows the other: the first and the last, a decayed one, what is added, both.

    With one chunk, the first is the last.
    """
    return add(4, minimum(1, maximum(0, add(tokens, -chunk))))


def chunks_rowwise(tokens: Expr, inner: Expr, size: Expr, full: int) -> tuple[Stage, ...]:
    """As `chunks`, with a decay for each row of the state: decays from each key on, and the keys that they weigh."""
    chunk = minimum(tokens, ROWWISE_CHUNK)
    keys, values, products = mul(full, inner), mul(full, size), mul(full, chunk)
    return (
        Stage(add(mul(7, keys), values, mul(2, products)), 1),
        Stage(add(mul(8, keys), mul(2, values), mul(2, products)), 1),
        Stage(add(mul(6, keys), mul(3, values), products), looped(tokens, ROWWISE_CHUNK), mul(chunk, values)),
    )


def has_rowwise_decay(use: Use) -> bool:
    return use.has("decay") and len(use.shape("decay")) == 4
