"""What norms and turns queries and keys and writes the cache: Triton on GPUs, elsewhere the reference."""

from __future__ import annotations

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, largest, mul
from precast.kernels.attention.records import CONVERTS
from precast.kernels.records import Condition, reference
from precast.kernels.rotary_write_kv import launches
from precast.kernels.rows import in_triton
from precast.kernels.use import Use, numbers, size, wide

_SIZES = (("q", 2), ("q", 3), ("v", 2), ("v", 3), ("k_cache", 1))
_KNOWN = Condition(
    "heads, tables and pages of known sizes",
    lambda use: all(bool(use.number(name, axis)) for name, axis in _SIZES) and use.number("cos", -1) is not None,
)


def _rotary_write_kv(use: Use) -> Expr:
    """The heads normed and turned one after the other, wide copies of them, and what `write_kv` gathers and rounds."""
    q, k, v = (use.operands[name] for name in "qkv")
    heads = (add(size(x), mul(6 * wide(x), numbers(x))) for x in (q, k))
    rounding = 16 if use.has("k_scale") else 8
    written = add(mul(rounding, add(numbers(k), numbers(v))), mul(64, use.shape("slot_mapping")[0]))
    tables = mul(2 * wide(q), numbers(use.operands["cos"]))
    return add(largest(heads), size(k), written, tables)


RECORDS = (
    in_triton(
        "precast.rotary_write_kv",
        launches.rotary_write_kv,
        ("q", "cos", "sin", "q_weight", "k_weight"),
        _KNOWN,
        CONVERTS,
    ),
    reference("precast.rotary_write_kv", "rotary_write_kv.rotary_write_kv", _rotary_write_kv),
)
