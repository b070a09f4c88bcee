"""Limits of the drivers that several families share: what they hold follows from them. No torch."""

TOGETHER = 4096
"""Tokens, with those that pad, of the sequences that `precast.kernels.states` computes at once, if that is one
sequence at least."""
