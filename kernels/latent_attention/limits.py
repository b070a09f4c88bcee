"""Limits of `precast.kernels.latent_attention.batched`: what it holds follows from them. No torch."""

MAX_EXPANDED = 1 << 27
"""Elements of expanded keys and values that exist at a time, if that is one head at least."""
