"""How much `precast.kernels.latent_attention.batched` expands at a time. Records count with it, so no torch here."""

MAX_EXPANDED = 1 << 27
"""Elements of expanded keys and values that exist at a time, if that is one head at least."""
