"""What computes causal convolutions: Triton on GPUs, else gathers over all tokens at once; none reads the host."""

from __future__ import annotations

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, mul
from precast.kernels.causal_conv import launches
from precast.kernels.stateful.form_records import form_records, sequences_of
from precast.kernels.stateful.launch_records import launch_records
from precast.kernels.use import Use, numbers, wide


def _causal_conv(use: Use) -> Expr:
    """A table of states and tokens; the sum, and of one tap the gathered rows and their product."""
    x, full = use.operands["x"], wide(use.operands["x"])
    narrow, taps = use.width("x"), use.shape("weight")[1]
    before = mul(4 * max(narrow, full), sequences_of(use), x.type.shape[2], taps)
    return add(mul(narrow + 2 * full, numbers(x)), before, mul(80, x.type.shape[1]))


RECORDS = (
    *launch_records("causal_conv", launches.causal_conv, takes=(launches.HAS_KNOWN_SIZES,)),
    *form_records("causal_conv", "gathered", _causal_conv, control="static"),
)
