"""What computes delta rules: Triton on GPUs, token by token and in chunks; else chunks in PyTorch.

With a decay for each element of the key, and with very long keys, Triton walks steps of up to `MAX_WALKED` tokens only.
"""

from __future__ import annotations

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, minimum, mul
from precast.kernels.delta_rule import launches
from precast.kernels.linear_attention.limits import CHUNK, ROWWISE_CHUNK
from precast.kernels.linear_attention.workspace import has_rowwise_decay, looped
from precast.kernels.stateful.form_records import Stage, copy_bytes, form_records, padded_tokens, staged
from precast.kernels.stateful.launch_records import launch_records
from precast.kernels.stateful.limits import MAX_WALKED
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


RECORDS = (
    *launch_records(
        "delta_rule", launches.few, variant=".few", sizes={"T": (0, launches.FEW)}, takes=(launches.HAS_KNOWN_SIZES,)
    ),
    *launch_records(
        "delta_rule", launches.chunked, workspace=launches.chunk_bytes,
        takes=(launches.HAS_KNOWN_SIZES, launches.FITS_CHUNKS),
    ),
    *launch_records(
        "delta_rule", launches.walk, variant=".walk", sizes={"T": (0, MAX_WALKED)}, takes=(launches.HAS_KNOWN_SIZES,)
    ),
    *form_records("delta_rule", "chunked", _delta_rule),
    # Where torch is not installed.
    *launch_records("delta_rule", launches.walk, variant=".walk_all", takes=(launches.HAS_KNOWN_SIZES,)),
)  # fmt: skip
