"""How much `precast.kernels.experts.grouped` gathers at a time. Records count with it, so no torch here."""

GATHERED_ELEMENTS = 1 << 26
"""Elements of weights that are gathered at a time, if that is one expert at least."""
VECTOR = 8
"""Sizes of bfloat16 weights that `grouped_mm` takes are multiples of it: vectors of 16 bytes."""
