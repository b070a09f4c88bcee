"""How `few_bits_tiles.cuh` is told of a weight in few bits. No torch and no triton here."""

from __future__ import annotations

FORMATS = {
    "packed4": ("PACKED4", 4), "mxfp4": ("FP4", 4), "nvfp4": ("FP4", 4), "nvfp4_divided": ("FP4", 4),
    "fp8": ("FLOAT8", 8), "int8": ("INT8", 8), "packed8": ("INT8", 8),
}  # fmt: skip
"""How it calls a format, and bits of a value."""
ELEMENT, FLOAT32, E4M3, E8M0, FLOAT16 = range(5)
"""Types of scales."""
MOST_TAKEN = 112
"""What is subtracted from values of four bits besides a point: bfloat16 holds whole numbers from 128 to 256."""
MIDDLE = 128
"""What is subtracted from values of eight bits in words; besides points it is 0 or 1, so that bfloat16 holds it."""
