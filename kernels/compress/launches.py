"""The launch of the compression of blocks in Triton, and the sizes of its tiles. No torch, no triton."""

from __future__ import annotations

from precast.ir.graph.symbols import add, ceildiv
from precast.kernels.blocks import power_of_two
from precast.kernels.records import Condition, Launch, Pointer, Stride
from precast.kernels.rows import known
from precast.kernels.stateful.form_records import sequences_of
from precast.kernels.use import Use

MAX_WIDTH = 512
"""Tokens that an entry is made of, at most."""
_TILE, _CHANNELS = 2048, 128
"""Elements that a program holds of such tokens, and channels of these at most."""
_TOKENS = 16
"""Tokens of a program that aren't a sequence's first ones."""


def _has_known_sizes(use: Use) -> bool:
    return bool(use.number("bias", 1)) and 0 < (use.number("bias", 0) or 0) <= MAX_WIDTH and bool(use.number("kv", 2))


HAS_KNOWN_SIZES = Condition(f"entries of known size, of at most {MAX_WIDTH} tokens", _has_known_sizes)


def compress(use: Use) -> tuple[Launch, ...]:
    """One launch: sequences, with their first tokens and their states, and blocks of all tokens."""
    (width, size), channels = (known(use, "bias", axis) for axis in (0, 1)), known(use, "kv", 2)
    tokens, sequences, has_pdl = use.shape("kv")[1], sequences_of(use), use.target.capability >= (9, 0)
    block = min(power_of_two(size), _CHANNELS, _TILE // power_of_two(width))
    return (
        Launch(
            "precast.kernels.compress.triton:compress_kernel",
            (-(-size // block), add(sequences, ceildiv(tokens, _TOKENS))),
            (
                Pointer("out.0"), Pointer("kv"), Pointer("gate"), Pointer("bias"),
                *(Pointer(name) if use.has(name) else None for name in ("state", "slots", "cu_seqlens", "kv_lens")),
                sequences, tokens, *(Stride(name, axis) for name in ("kv", "gate") for axis in (1, 2)),
                *(Stride("bias", axis) for axis in (0, 1)),
                *(Stride("state", axis) if use.has("state") else 0 for axis in range(4)),
            ),
            {
                "SIZE": size, "WIDTH": width, "RATE": width if channels == size else width // 2,
                "BLOCK_T": _TOKENS, "BLOCK_W": power_of_two(width), "BLOCK_D": block, "PDL": has_pdl,
            },
            pdl=has_pdl,
        ),
    )  # fmt: skip
