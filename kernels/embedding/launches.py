"""The launch that puts drawn tokens among a step's token ids (`precast.kernels.embedding.drawn`). No torch."""

from __future__ import annotations

from precast.ir.graph.symbols import ceildiv
from precast.kernels.records import Launch, Pointer

_BLOCK = 256


def known_ids(has_pdl: bool) -> tuple[Launch, ...]:
    """One launch: `ids` [T] and `drawn` [R] int64 in, [T] out."""
    return (
        Launch(
            kernel="precast.kernels.embedding.triton:known_ids_kernel",
            grid=(ceildiv("T", _BLOCK),),
            args=(Pointer("out.0"), Pointer("ids"), Pointer("drawn"), "T"),
            constants={"BLOCK": _BLOCK, "PDL": has_pdl},
            num_warps=_BLOCK // 32,
            pdl=has_pdl,
        ),
    )
