"""What bounds the memory that drawing holds. Records count with it, so no torch here."""

from precast.ir.graph.schema import Dtype

SAMPLE_VERSION = 2
"""The version of `precast.sample` by which a step of an engine draws."""
PARAMETERS: dict[str, Dtype] = {
    "temperature": "float32", "top_k": "int32", "top_p": "float32", "min_p": "float32", "seeds": "int64",
    "steps": "int64",
}  # fmt: skip
"""What it takes beside logits, one of each a row."""
MAX_SORTED = 1 << 22
"""Logits that are sorted at a time, if that is one row at least. Sums of so many weights of 2^40 fit int64."""

# Of the Triton implementation, powers of two but for PASSES:
BLOCK = 1024
"""Logits of a tile: what a program holds at a time."""
NUM_WARPS = 8
"""Of a program."""
PROGRAMS = 1024
"""How many programs are wanted at once: eight of 256 threads on each multiprocessor of an H200 are 1,056."""
MIN_SPLITS, MAX_SPLITS = 16, 64
"""Programs that share a row, at least and at most."""
OWN_GROUPS = 128
"""Groups of tokens in a program's part of a row: their maxima bound the k-th largest logit of the row."""
GROUPS = 2048
"""Groups of a row of which the k-th largest maximum is found: at most `MAX_SPLITS * OWN_GROUPS`."""
SHORT, CAPACITY = 512, 2048
"""Tokens that may pass top_k which are sorted in little time, and at all; of more the row is read again. At most
`MAX_SPLITS * OWN_GROUPS / 2`."""
PASSES = 3
"""How often all programs go over a row that has top_p but no top_k."""

PLAN, LIMITS = 5, 5
"""Integers and floats that are noted of a row, see `precast.kernels.sampling.triton`."""


def row_bytes() -> int:
    """Bytes of workspace that a row of logits takes in the Triton implementation, whatever its length.

    Of each split, maxima of groups (later a list of tokens), a largest and a least logit and a token; of each split and
    pass a sum, a score and a token; the row's own numbers.
    """
    return MAX_SPLITS * (4 * OWN_GROUPS + 12 + 16 * PASSES) + 4 * (PLAN + LIMITS)
