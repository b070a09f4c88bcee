"""How many tokens are computed at a time, and in which steps. Records count with it, so no torch here."""

MAX_TOGETHER = 4096
"""Tokens, padding among them, of the sequences that `precast.kernels.stateful.walks` computes together; a longer
sequence is computed alone."""
MAX_WALKED = 1024
"""Tokens of a step that `precast.kernels.stateful.triton` walks over one by one. A sequence's tokens can't be computed
side by side there: a longer prompt is faster in chunks, though these are cut on the host."""
