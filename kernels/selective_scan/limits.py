"""Limits of `precast.kernels.selective_scan.blocked`: what it holds follows from them. No torch."""

MIN_BLOCK = 16
"""Tokens of a block at least: with fewer, a block of its own is more work than the steps that it saves."""
