"""What computes rotary embeddings: Triton on GPUs, the references elsewhere and for what Triton does not take."""

from __future__ import annotations

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, largest, mul, numel
from precast.ir.weights.tensorfile import element_bytes
from precast.kernels.records import Condition, reference
from precast.kernels.rotary import launches
from precast.kernels.rows import in_triton
from precast.kernels.use import Use, copied, numbers, type_bytes, wide, width


def _rotary_tables(use: Use) -> Expr:
    """Angles, a table and its scaled copy, before that is rounded."""
    made = element_bytes(use.result.dtype)
    return add(mul(12 - made, numel(use.result.shape)), mul(4, numbers(use.operands["positions"])))


def _rope_frequencies(use: Use) -> Expr:
    return mul(6, type_bytes(use.result))


def _rotary(use: Use) -> Expr:
    """Of the turned part a wide copy, the halves of products, the halves joined, their rounded copy."""
    x, table = use.operands["x"], use.operands["cos"]
    full, narrow, copy = wide(x), width(x), copied(x)
    turned = mul(2, table.type.shape[-1])
    halves = add(mul(copy + 2 * full, turned), mul(-narrow, x.type.shape[3]))
    joined = mul(copy + full + (narrow if copy else 0), turned)
    tables: Expr = mul(2 * full, numbers(table)) if width(table) < full else 0
    return add(mul(numel(x.type.shape[:3]), largest((halves, joined))), tables)


_KNOWN = Condition(
    "heads and tables of known sizes", lambda use: bool(use.number("x", -1)) and use.number("cos", -1) is not None
)
_KNOWN_TABLE = Condition("tables of known size", lambda use: bool(use.number("inv_freq", -1)))

RECORDS = (
    in_triton("precast.rotary", launches.rotary, ("x", "cos", "sin"), _KNOWN),
    in_triton("precast.rotary_tables", launches.rotary_tables, (), _KNOWN_TABLE),
    reference("precast.rotary", "rotary.rotary", _rotary),
    reference("precast.rotary_tables", "rotary.rotary_tables", _rotary_tables),
    reference("precast.rope_frequencies", "rotary.rope_frequencies", _rope_frequencies),
)
