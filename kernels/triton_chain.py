"""Where a Triton kernel lets the next of a chain begin, and waits for the one in front (programmatic dependent launch).

A launch with `pdl` begins while the kernel in front still runs. Before `wait_for_previous` it may read what no kernel
of the step writes, such as weights; and it writes nothing.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.language.extra import cuda

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def wait_for_previous(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """All that earlier kernels wrote is there afterwards. Programs of a launch with `pdl` come here.

    Those with nothing to do may end without, but for `is_first_program`: a launch that ended before the one in front
    would let the next one read too early.
    """
    if PDL and not _INTERPRETED:
        # First, so that the next kernel can request its weights; it waits for the end of this one itself.
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()


@triton.jit
def let_next_begin(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """The next kernel may begin; for a kernel that reads something before it waits."""
    if PDL and not _INTERPRETED:
        cuda.gdc_launch_dependents()


@triton.jit
def is_first_program():  # type: ignore[no-untyped-def]
    """One program of a launch."""
    return (tl.program_id(0) == 0) & (tl.program_id(1) == 0) & (tl.program_id(2) == 0)


@triton.jit
def prefetch(pointers, BYTES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Asks the L2 cache for BYTES, a multiple of 16, from each pointer on. Compute capability 9.0 or higher.

    What is read later is what is there then: what an earlier kernel still writes may be asked for too.
    """
    if not _INTERPRETED:
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
            [pointers.to(tl.int64), tl.full(pointers.shape, BYTES, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def stop_unless(holds):  # type: ignore[no-untyped-def]
    """Stops the program, as PyTorch's kernels do for an index of nothing, unless a condition of one program holds."""
    if not _INTERPRETED:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.eq.s32 p, $1, 0; @p trap; mov.u32 $0, 0; }", "=r,r", [holds.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
