"""What computes linear attention: Triton on GPUs; else chunks as products of matrices in PyTorch."""

from __future__ import annotations

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, mul
from precast.kernels.linear_attention.limits import CHUNK, ROWWISE_CHUNK
from precast.kernels.linear_attention.state_records import state_records
from precast.kernels.linear_attention.workspace import chunks, chunks_rowwise, has_rowwise_decay
from precast.kernels.stateful.form_records import copy_bytes, form_records, padded_tokens, staged
from precast.kernels.use import Use, wide


def _linear_attention(use: Use) -> Expr:
    """Copies of all, and their chunks."""
    full = wide(use.operands["v"])
    (_, tokens, heads, value), inner = use.shape("v"), use.shape("q")[3]
    is_rowwise = has_rowwise_decay(use)
    chunk = ROWWISE_CHUNK if is_rowwise else CHUNK
    stages = (chunks_rowwise if is_rowwise else chunks)(tokens, inner, value, full)
    held = add(mul(copy_bytes(use, "v"), value), mul(2 * copy_bytes(use, "q"), inner), 2 * full)
    held_by_scan = staged(use, tokens, heads, chunk, mul(full, heads, inner, value), stages)
    return add(mul(padded_tokens(use, tokens), heads, held), held_by_scan, mul(64, tokens))


RECORDS = (*state_records("linear_attention"), *form_records("linear_attention", "chunked", _linear_attention))
