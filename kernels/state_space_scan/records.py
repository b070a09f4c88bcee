"""What computes state space scans: Triton on GPUs; else chunks of linear attention in PyTorch."""

from __future__ import annotations

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, mul
from precast.kernels.linear_attention.limits import CHUNK
from precast.kernels.linear_attention.state_records import state_records
from precast.kernels.linear_attention.workspace import chunks
from precast.kernels.stateful.form_records import Stage, copy_bytes, form_records, padded_tokens, staged
from precast.kernels.use import Use, wide


def _state_space_scan(use: Use) -> Expr:
    """Linear attention of c and b over steps times x, and the skip connection."""
    full = wide(use.operands["x"])
    (_, tokens, heads, size), inner = use.shape("x"), use.shape("b")[3]
    padded = padded_tokens(use, tokens)
    held = add(mul(copy_bytes(use, "x") + full, size), mul(2 * full, inner), 2 * full)
    given = mul(2 * copy_bytes(use, "b"), padded, *use.shape("b")[2:])
    skip = Stage(add(mul(3 * full, size), full), 2)
    stages = (*chunks(tokens, inner, size, full), skip)
    held_by_scan = staged(use, tokens, heads, CHUNK, mul(full, heads, size, inner), stages)
    return add(mul(padded, heads, held), held_by_scan, given, mul(tokens, add(mul(4 * full, heads), 64)))


RECORDS = (*state_records("state_space_scan"), *form_records("state_space_scan", "chunked", _state_space_scan))
