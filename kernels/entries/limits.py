"""How much attention over entries computes at a time. Records count with it, so no torch here."""

MAX_SCORES = 1 << 24
"""Scores of heads that exist at a time, if that is one query's: 64 MiB in float32. With 128 heads, those of one query
over 131,072 entries."""
MAX_ENTRIES = 1 << 24
"""Elements of gathered entries that exist at a time, if that is one query's: 64 MiB in float32."""
MAX_SIZE = 512
"""Elements of an entry that `precast.kernels.entries.triton_attend` takes: so many fit into registers and shared
memory."""
