"""How much the definitions of sparse attention compute at a time. Records count with it, so no torch here."""

MAX_SCORES = 1 << 24
"""Scores of heads that exist at a time, if that is one query's: 64 MiB in float32. With 64 heads, those of one query
over 131,072 keys are half of it."""
MAX_LATENTS = 1 << 24
"""Elements of gathered latents that exist at a time, if that is one query's: 64 MiB in float32. 2,048 latents of 576
elements are 4.5 MiB."""
