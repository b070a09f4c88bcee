"""What bounds the memory that drawing holds. Records count with it, so no torch here."""

SAMPLE_VERSION = 2
"""The version of `precast.sample` by which a step of an engine draws."""
MAX_SORTED = 1 << 22
"""Logits that are sorted at a time, if that is one row at least. Sums of so many weights of 2^40 fit int64."""

# Of the Triton implementation, powers of two:
MAX_SPLITS = 128
"""Programs that may share a row."""
BINS = 2048
"""Bins into which the candidates of a row are counted and weighed."""
GROUPS = 2048
"""Groups of a row whose maxima bound its k-th largest logit: at least `MAX_SPLITS`, at most a tile of tokens."""
CAPACITY = 2048
"""Tokens that a program decides about at a time: those of the bins at the edges of what passes."""


def row_bytes() -> int:
    """Bytes of workspace that a row of logits takes in the Triton implementation, whatever its length.

    A list of maxima, later of tokens; counts and weights of the bins; a sum, three floats and three integers of each
    split; four sums, four floats and six integers of the row.
    """
    return 4 * max(GROUPS, CAPACITY) + 12 * BINS + 32 * MAX_SPLITS + 72
