"""How much the implementations of latent attention compute at a time, and what they take. Records count with it, so no
torch here."""

MAX_EXPANDED = 1 << 27
"""Elements of expanded keys and values that exist at a time in `precast.kernels.latent_attention.batched`, if that is
one head at least."""
MAX_LATENT = 512
"""Elements of a latent that `precast.kernels.latent_attention.triton` takes: so many fit into registers and shared
memory."""
MAX_ROPE = 64
"""The same of the part of the keys that heads share."""
