"""How many tokens a chunk of `precast.kernels.linear_attention.chunks` has. Records count with it, so no torch here."""

CHUNK = 64
"""Tokens of a chunk."""
ROWWISE_CHUNK = 16
"""The same with a decay for each row of the state: there is no product of matrices within a chunk, so that its work
grows with the chunk, element by element."""
