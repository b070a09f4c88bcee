"""How many logits `precast.kernels.sampling.sample` sorts at a time. Records count with it, so no torch here."""

MAX_SORTED = 1 << 22
"""Logits that are sorted at a time, if that is one row at least. Sums of so many weights of 2^40 fit int64."""
