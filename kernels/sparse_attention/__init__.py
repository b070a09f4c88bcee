"""Attention over selected keys: the keys' scores, their selection, and attention over the latents of these alone."""
