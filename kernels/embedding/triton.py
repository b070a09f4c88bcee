"""Token ids that the step before drew, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.triton_chain import wait_for_previous


@triton.jit
def known_ids_kernel(known_ptr, ids_ptr, drawn_ptr, num_ids, BLOCK: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """ids, with `drawn[row]` in the place of `-1 - row`, and 0 where that is below 0. One program BLOCK of them."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < num_ids
    wait_for_previous(PDL)
    ids = tl.load(ids_ptr + i, mask=mask, other=0)
    drawn = tl.load(drawn_ptr + (-1 - ids), mask=mask & (ids < 0), other=0)
    tl.store(known_ptr + i, tl.maximum(tl.where(ids < 0, drawn, ids), 0), mask=mask)
