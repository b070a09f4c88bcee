"""How many tokens `precast.kernels.stateful.walks` computes at a time. Records count with it, so no torch here."""

MAX_TOGETHER = 4096
"""Tokens, padding among them, of the sequences that are computed together; a longer sequence is computed alone."""
