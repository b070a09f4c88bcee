"""What looks up embeddings: the reference, everywhere."""

from __future__ import annotations

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add
from precast.kernels.records import reference
from precast.kernels.use import Use, type_bytes


def _embedding(use: Use) -> Expr:
    """The rows before they are scaled, and the scale."""
    return 0 if use.constant("scale") in (None, 1.0) else add(type_bytes(use.result), 16)


RECORDS = (reference("precast.embedding", "embedding.embedding", _embedding),)
