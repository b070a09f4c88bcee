"""How much attention to selected blocks computes at a time. Records count with it, so no torch here."""

MAX_SCORES = 1 << 24
"""Scores of heads that exist at a time, if that is one query's: 64 MiB in float32."""
MAX_SIZE = 256
"""Elements of a head that `precast.kernels.block_sparse_attention.triton_attend` takes."""
MAX_SCORED_SIZE = 128
"""Elements of a head that `triton_select` takes."""
MAX_ROWS = 64
"""Heads of a query that are rows of one product there."""
MAX_COUNT = 64
"""Blocks that a query selects there."""
MAX_SELECTED = 2048
"""Blocks that a query attends to there."""
