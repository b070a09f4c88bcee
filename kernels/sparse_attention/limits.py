"""How much sparse attention computes at a time, and what its kernels take. Records count with it, so no torch here."""

MAX_SCORES = 1 << 24
"""Scores of heads that exist at a time, if that is one query's: 64 MiB in float32. With 64 heads, those of one query
over 131,072 keys are half of it."""
MAX_LATENTS = 1 << 24
"""Elements of gathered latents that exist at a time, if that is one query's: 64 MiB in float32. 2,048 latents of 576
elements are 4.5 MiB."""
MAX_SIZE = 128
"""Elements of a key that `precast.kernels.sparse_attention.triton_select` takes."""
MAX_HEADS = 128
"""Heads that score a key there."""
OWN_SCORES = 132 * 4 << 17
"""Scores of prompts that exist at a time there, if that is a tile of queries at least: 264 MiB. Of four queries over
131,072 keys they are room for 132 programs, of two for all that there are."""
