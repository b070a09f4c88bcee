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
OWN_SCORES = 132 * 4 * 163840
"""Scores of prompts that exist at a time on a GPU, if that is a tile of queries at least: 330 MiB. They are room for
132 programs of four queries each over DeepSeek-V3.2's 163,840 keys; with more keys fewer programs compute."""
