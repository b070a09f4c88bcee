"""What computes selective scans: Triton token by token on GPUs; else tiles of tokens side by side."""

from __future__ import annotations

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, floordiv, minimum, mul
from precast.kernels.selective_scan.launches import HAS_KNOWN_SIZES, selective_scan
from precast.kernels.selective_scan.limits import MIN_TILE
from precast.kernels.stateful.form_records import chunked_tokens, copy_bytes, form_records, sequences_of
from precast.kernels.stateful.launch_records import launch_records
from precast.kernels.use import Use, wide


def _selective_scan(use: Use) -> Expr:
    """Steps, values and outputs a token; and states at the tiles' beginnings, about the root of the tokens of them."""
    full = wide(use.operands["x"])
    _, tokens, channels = use.shape("x")
    inner, sequences = use.shape("b")[2], sequences_of(use)
    padded = chunked_tokens(use, tokens, MIN_TILE)
    a_token = add(mul(copy_bytes(use, "x") + 6 * full, channels), mul(4 * full, inner))
    tiles = add(_root(padded), sequences)
    return add(mul(padded, a_token), mul(5 * full, tiles, channels, inner), mul(64, tokens))


def _root(tokens: Expr) -> Expr:
    """At least the root of the tokens: it lies below each of its tangents."""
    return minimum(*(add(floordiv(tokens, 2 * at), at // 2 + 3) for at in (16, 32, 64, 128, 256)))


RECORDS = (
    *launch_records("selective_scan", selective_scan, takes=(HAS_KNOWN_SIZES,)),
    *form_records("selective_scan", "tiled", _selective_scan),
)
