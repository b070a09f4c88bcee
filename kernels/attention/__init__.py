"""Attention over packed sequences, with and without a paged cache, and the write into that cache."""
