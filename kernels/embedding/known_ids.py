"""The launch that puts tokens, which the step before drew, in their places among a step's ids. No torch."""

from __future__ import annotations

from precast.ir.graph.symbols import ceildiv
from precast.kernels.records import Launch, Pointer

_BLOCK = 256


def launches(has_pdl: bool) -> tuple[Launch, ...]:
    """One launch, over `ids` and `drawn`; T are the ids."""
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
