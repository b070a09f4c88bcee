"""Sizes of the blocks that a program of a kernel works on. No torch and no triton here."""

from __future__ import annotations


def power_of_two(size: int) -> int:
    """The smallest power of two that is not below `size`; 1 for 0."""
    return 1 << max(size - 1, 0).bit_length()


def num_warps(elements: int) -> int:
    """Warps for a block of so many elements, a power of two: 8 elements a thread, where 16 warps are enough."""
    return min(max(elements // 256, 1), 16)
