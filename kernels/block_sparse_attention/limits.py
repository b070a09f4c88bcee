"""How much attention to selected blocks computes at a time. Records count with it, so no torch here."""

MAX_SCORES = 1 << 24
"""Scores of heads that exist at a time, if that is one query's: 64 MiB in float32."""
