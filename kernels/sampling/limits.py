"""Limits of `precast.kernels.sampling.sample`: what drawing holds follows from them. No torch."""

TOGETHER = 1 << 22
"""Logits that are sorted at a time, if that is one row at least. Sums of so many weights of 2^40 fit int64."""
