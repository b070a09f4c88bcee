"""The launch of the linear recurrence in Triton (`precast.kernels.linear_recurrence.triton`). No torch here."""

from __future__ import annotations

from precast.ir.graph.symbols import add, ceildiv
from precast.kernels.records import Condition, Launch, Pointer, Stride
from precast.kernels.rows import known, overlaps
from precast.kernels.use import Use

AHEAD = 16
"""Tokens that a walk asks for before it computes them: a token takes a fraction of the time that memory does."""
_BLOCK = 32
"""Channels of a program: one for each thread of a warp."""

HAS_KNOWN_CHANNELS = Condition("channels that are known", lambda use: use.number("x", 2) is not None)


def linear_recurrence(use: Use) -> tuple[Launch, ...]:
    """One launch for both forms, for sequences of any lengths, and for padding."""
    channels, sequences = known(use, "x", 2), add(use.shape("cu_seqlens")[0], -1)
    tensors = ("x", "factor", "state", "slots", "cu_seqlens", "kv_lens")
    axes = {"x": (1, 2), "factor": (1, 2), "state": (0, 1)}
    return (
        Launch(
            kernel="precast.kernels.linear_recurrence.triton:linear_recurrence_kernel",
            grid=(ceildiv(channels, _BLOCK), add(sequences, 1)),
            args=(
                Pointer("out.0"),
                *(Pointer(name) if use.has(name) else None for name in tensors),
                sequences,
                use.shape("x")[1],
                *(Stride(name, axis) if use.has(name) else 0 for name in axes for axis in axes[name]),
            ),
            constants={
                "IS_SUM": use.constant("kind") != "max",
                "CHANNELS": channels,
                "BLOCK": _BLOCK,
                "AHEAD": AHEAD,
                "PDL": overlaps(use),
            },
            num_warps=1,
            pdl=overlaps(use),
        ),
    )
