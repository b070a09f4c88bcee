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
    """All that earlier kernels wrote is there afterwards. Every program of a launch with `pdl` comes here."""
    if PDL and not _INTERPRETED:
        # First, so that the next kernel can request its weights; it waits for the end of this one itself.
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
