"""What the records and what they name both know; no torch here."""

MAX_ROWS_AT_ONCE = 4096
"""Rows whose product is held between its two launches.

Enough for cuBLAS to be as fast as it is for more, and at most 235 MB where a product is 28,672 wide.
"""
