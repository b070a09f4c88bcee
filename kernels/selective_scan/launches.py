"""The launch of the selective scan in Triton (`precast.kernels.selective_scan.triton`). No torch here."""

from __future__ import annotations

from precast.ir.graph.symbols import add, ceildiv
from precast.kernels.blocks import power_of_two
from precast.kernels.records import Condition, Launch, Pointer, Stride
from precast.kernels.rows import known, overlaps
from precast.kernels.use import Use

AHEAD = 8
"""Tokens that a walk asks for before it computes them: a token takes a fraction of the time that memory does."""
_ELEMENTS = 512
"""Numbers of the state that a program has: 16 for each thread of a warp."""

HAS_KNOWN_SIZES = Condition(
    "channels and a width that are known", lambda use: None not in (use.number("a", 0), use.number("a", 1))
)


def selective_scan(use: Use) -> tuple[Launch, ...]:
    """One launch for both forms, for sequences of any lengths, and for padding."""
    channels, width = known(use, "a", 0), known(use, "a", 1)
    sequences, block_n = add(use.shape("cu_seqlens")[0], -1), power_of_two(width)
    block_c = max(1, _ELEMENTS // block_n)
    tensors = ("x", "dt", "a", "b", "c", "d", "dt_bias", "state", "slots", "cu_seqlens", "kv_lens")
    axes = {"x": (1, 2), "dt": (1, 2), "a": (0, 1), "b": (1, 2), "c": (1, 2), "d": (0,), "dt_bias": (0,),
            "state": (0, 1, 2)}  # fmt: skip
    return (
        Launch(
            kernel="precast.kernels.selective_scan.triton:selective_scan_kernel",
            grid=(ceildiv(channels, block_c), add(sequences, 1)),
            args=(
                Pointer("out.0"),
                *(Pointer(name) if use.has(name) else None for name in tensors),
                sequences,
                use.shape("x")[1],
                *(Stride(name, axis) if use.has(name) else 0 for name in axes for axis in axes[name]),
            ),
            constants={
                "SOFTPLUS": bool(use.constant("softplus")),
                "CHANNELS": channels,
                "WIDTH": width,
                "BLOCK_C": block_c,
                "BLOCK_N": block_n,
                "AHEAD": AHEAD,
                "PDL": overlaps(use),
            },
            num_warps=1,
            pdl=overlaps(use),
        ),
    )
