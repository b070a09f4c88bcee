"""How much `precast.kernels.attention.batched` computes at a time. Records count with it, so no torch here."""

TILE = 128
"""Queries of a tile: bounds the mask and the scores to this many rows a head, and keeps products large."""
MAX_GATHERED = 1 << 25
"""Elements of keys and values that decoding sequences gather at a time, if that is one sequence at least: bounds what
they hold beside the cache."""
