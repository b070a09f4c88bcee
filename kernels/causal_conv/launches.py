"""The launch of causal convolutions in Triton, and the sizes of its tiles. No torch, no triton."""

from __future__ import annotations

from precast.ir.graph.symbols import add, ceildiv
from precast.kernels.blocks import power_of_two
from precast.kernels.records import Condition, Launch, Pointer, Stride
from precast.kernels.rows import known
from precast.kernels.stateful.form_records import sequences_of
from precast.kernels.use import Use

_TOKENS, _CHANNELS = 16, 256
"""What a program computes of later tokens: 32 numbers of each thread of 4 warps."""
HAS_KNOWN_SIZES = Condition(
    "channels and taps that are known at load", lambda use: all(use.number("weight", axis) for axis in (0, 1))
)


def causal_conv(use: Use) -> tuple[Launch, ...]:
    """One launch: sequences, with their first tokens and their states, and blocks of all tokens."""
    channels, taps = known(use, "weight", 0), known(use, "weight", 1)
    tokens, sequences = use.shape("x")[1], sequences_of(use)
    block = min(power_of_two(channels), _CHANNELS)
    optional = ("bias", "state", "slots", "cu_seqlens", "kv_lens")
    given = (Pointer(name) if use.has(name) else None for name in optional)
    has_pdl = use.target.capability >= (9, 0)
    return (
        Launch(
            "precast.kernels.causal_conv.triton:causal_conv_kernel",
            (-(-channels // block), add(sequences, ceildiv(tokens, _TOKENS))),
            (
                Pointer("out.0"), Pointer("x"), Pointer("weight"), *given, sequences, tokens,
                Stride("x", 1), Stride("x", 2), Stride("weight", 0), Stride("weight", 1),
                Stride("bias", 0) if use.has("bias") else 0,
                *(Stride("state", axis) if use.has("state") else 0 for axis in range(3)),
            ),
            {
                "CHANNELS": channels, "BEFORE": taps - 1, "SILU": use.constant("activation") == "silu",
                "BLOCK_T": _TOKENS, "BLOCK_C": block, "BLOCK_K": power_of_two(max(taps - 1, 1)), "PDL": has_pdl,
            },
            pdl=has_pdl,
        ),
    )  # fmt: skip
