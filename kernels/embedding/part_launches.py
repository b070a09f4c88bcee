"""The launch that looks up a rank's part of the vocabulary."""

from __future__ import annotations

from precast.ir.graph.schema import Const, Dim, Expr
from precast.ir.graph.symbols import ceildiv
from precast.kernels.blocks import num_warps, power_of_two
from precast.kernels.records import Launch, Pointer, Stride
from precast.kernels.rows import known, overlaps, real
from precast.kernels.use import Use

_BLOCK = 1024
"""Elements that one program copies: few rows are copied by many programs."""


def sharded_embedding(use: Use) -> tuple[Launch, ...]:
    """One launch."""
    width, has_pdl, places = known(use, "weight", -1), overlaps(use), len(use.shape("ids"))
    block = min(_BLOCK, power_of_two(width))
    launch = Launch(
        kernel="precast.kernels.embedding.part_triton:part_rows_kernel",
        grid=(use.shape("ids")[-1], ceildiv(width, block)),
        args=(
            Pointer("out.0"), Pointer("weight"), Pointer("ids"), use.shape("weight")[0], first_row(use),
            Stride("weight", 0), Stride("weight", 1), Stride("ids", places - 1),
        ),
        constants={
            "SCALE": real(use, "scale") if use.constant("scale") is not None else 1.0, "WIDTH": width, "BLOCK": block,
            "PDL": has_pdl,
        },
        num_warps=num_warps(block),
        pdl=has_pdl,
    )  # fmt: skip
    return (launch,)


def first_row(use: Use) -> Expr:
    """The id of the part's first row."""
    arg = use.node.args["start"]
    if isinstance(arg, Dim):
        return arg.expr
    assert isinstance(arg, Const), "verified: an integer"
    assert isinstance(arg.value, int), "verified: an integer"
    return arg.value
