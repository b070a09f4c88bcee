"""What chooses experts: Triton on GPUs; the reference on CPUs, and where Triton doesn't take the types."""

from __future__ import annotations

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import mul
from precast.kernels.records import Condition, Record, nothing, reference
from precast.kernels.route.launches import launches
from precast.kernels.use import Use, numbers, wide


def _route(use: Use) -> Expr:
    """Scores, ranks and the places of the sorted ones."""
    return mul(8 * wide(use.operands["logits"]), numbers(use.operands["logits"]))


_MOST = 1024
"""So many experts a program can hold."""
_FITS = Condition(
    f"at most {_MOST} experts, as many as are known at load",
    lambda use: (use.number("logits", 1) or _MOST + 1) <= _MOST,
)

RECORDS = (
    Record(
        name="triton.route", op="precast.route", kind="triton", devices=("cuda",), min_capability=(8, 0),
        dtypes={"logits": ("float16", "bfloat16", "float32"), "bias": ("float16", "bfloat16", "float32")},
        takes=(_FITS,), allocates=False, workspace=nothing, runs=launches,
    ),
    reference("precast.route", "route.route", _route),
)  # fmt: skip
