"""What computes the compression of blocks: Triton on GPUs, else the definition."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from precast.ir.graph import symbols
from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, floordiv, mul
from precast.kernels.compress import launches
from precast.kernels.records import Record, reference
from precast.kernels.stateful.form_records import sequences_of
from precast.kernels.stateful.launch_records import launch_records
from precast.kernels.use import Use, wide


def _compressed(use: Use) -> Expr:
    """Of a sequence: keys and gates, widened, and behind those before; the results; and of its blocks keys, gates,
    scores, shares and products, a row for each token of a block, or two where blocks overlap."""
    tokens, channels = use.shape("kv")[1:]
    width, size = use.shape("bias")
    full = wide(use.operands["kv"])
    rate = width if symbols.equal(channels, size) else floordiv(width, 2)
    line = mul(4 * full, channels, add(tokens, width))
    blocks = add(floordiv(tokens, rate), 1)
    return add(line, mul(7 * full, blocks, width, size), mul(full, tokens, size), mul(96, tokens))


def _beginning(use: Use) -> Expr:
    """With states of its own, in the type that it computes in."""
    states = mul(wide(use.operands["kv"]), sequences_of(use), 2, use.shape("bias")[0], use.shape("kv")[2])
    return add(_compressed(use), states)


def _record(name: str, workspace: Callable[[Use], Expr]) -> Record:
    return replace(reference(f"precast.{name}", "compress.compress", workspace), control="host",
                   runs=f"precast.kernels.compress.compress:{name}")  # fmt: skip


RECORDS = (
    *launch_records("compress", launches.compress, takes=(launches.HAS_KNOWN_SIZES,)),
    _record("stateful_compress", _compressed),
    _record("compress", _beginning),
)
