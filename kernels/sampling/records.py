"""What draws tokens: Triton on GPUs, and the reference where that is missing; on CPUs, where looking at the parameters
is free, no more than they ask.
"""

from __future__ import annotations

from msgspec.structs import replace

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, floordiv, maximum, minimum, mul, numel
from precast.kernels.records import Condition, Record, reference
from precast.kernels.sampling import launches
from precast.kernels.sampling.limits import MAX_SORTED
from precast.kernels.use import Use, width


def _drawing(use: Use) -> Expr:
    """For each logit float32 copies, sorted ones, their int64 order, int64 weights and their sums: 42 bytes.

    To sort several rows at once a GPU numbers them too, and holds 48, and a quarter for its counters.
    """
    rows, together, size = _parts(use)
    several = minimum(1, maximum(0, add(together, -1)))
    numbered = mul(several, floordiv(mul(25, together, size), 4))
    return add(mul(42, together, size), numbered, mul(64, rows), 16 << 10)


def greedy_workspace(use: Use) -> Expr:
    """Bytes that `precast.kernels.sampling.sample.greedy` holds beside its result: magnitudes of logits."""
    rows, together, size = _parts(use)
    return add(mul(width(use.operands["logits"]), together, size), mul(64, rows), 16 << 10)


def _parts(use: Use) -> tuple[Expr, Expr, Expr]:
    """The rows of logits, how many of them are looked at together, and how many logits one has."""
    shape = use.shape("logits")
    rows, size = numel(shape[:-1]), shape[-1]
    return rows, minimum(rows, maximum(1, floordiv(MAX_SORTED, size))), size


_TWO_AXES = Condition(
    "logits [R, V] with a V of known size",
    lambda use: len(use.shape("logits")) == 2 and bool(use.number("logits", 1)),
)
_TRITON = Record(
    name="triton.sample_2", op="precast.sample", op_versions=(2,), kind="triton", devices=("cuda",),
    min_capability=(8, 0), dtypes={"logits": ("float16", "bfloat16", "float32")}, takes=(_TWO_AXES,),
    workspace=launches.workspace, runs=launches.sample, allocates=False,
)  # fmt: skip
_ON_HOST = Record(
    name="torch.sample", op="precast.sample", devices=("cpu",), control="host", workspace=_drawing,
    runs="precast.kernels.sampling.on_host:sample",
)  # fmt: skip
_REFERENCE = reference("precast.sample", "sampling.sample", _drawing)


def _second(record: Record) -> Record:
    """The record's implementation of version 2, which marks rows besides: less than drawing from them holds."""
    return replace(record, name=f"{record.name}_2", op_versions=(2,), runs=f"{record.runs}_2")


RECORDS = (_TRITON, _ON_HOST, _REFERENCE, _second(_ON_HOST), _second(_REFERENCE))
