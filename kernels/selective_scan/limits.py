"""How few tokens a tile of `precast.kernels.selective_scan.tiled` may have. Records count with it, so no torch here."""

MIN_TILE = 16
"""Tokens of a tile at least: with fewer, a tile of its own is more work than the steps that it saves."""
