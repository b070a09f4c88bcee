"""paged_select_entries@1: the entries that each of this step's queries selects among those in the pages of a cache, as
of keys in `precast.kernels.sparse_attention.select`, where query i sees the entries `e < (i + 1) // rate`.

A page has an entry for each `rate` of its places for tokens. Sequences, pages and positions are those of
`precast.kernels.attention.paged`; what is selected are numbers of entries, counted from the sequence's first. Tokens
past `cu_seqlens[B]` are padding, and select nothing: -1.
"""

from __future__ import annotations

import torch

from precast.kernels.attention.attend import Pages
from precast.kernels.attention.paged import PAGES_AXES
from precast.kernels.calls import implements
from precast.kernels.dtypes import FLOAT
from precast.kernels.entries.paged_entry_attention import each_kept
from precast.kernels.entries.select_entries import last_seen, numbers
from precast.kernels.sparse_attention.select import select
from precast.kernels.spec import OpSpec
from precast.kernels.storage import STORED


@implements("paged_select_entries")
def paged_select_entries(
    q: torch.Tensor, cache: torch.Tensor, weights: torch.Tensor, pages: Pages, scale: float, rate: int, count: int
) -> torch.Tensor:
    """`q` [1, T, H, D], `cache` [P, S / rate, D], `weights` [1, T, H] float32; [1, T, count] int32.

    A cache of another dtype, float8_e4m3fn too, is converted as it is read.
    """
    found = q.new_full((*q.shape[:2], count), -1, dtype=torch.int32)
    for rows, queries, (k, first) in each_kept(cache, pages, rate):
        found[0, rows] = select(
            q[0, rows], weights[0, rows], k, last_seen(queries, rate), numbers(k, first), scale, count
        )
    return found


PAGED_SELECT_ENTRIES = OpSpec(
    name="precast.paged_select_entries",
    axes={"q": "1 T H D", "cache": "P S D", "weights": "1 T H", **PAGES_AXES},
    results={"selected": "1 T M"},
    dtypes={"q": FLOAT, "cache": STORED, "weights": (torch.float32,)} | dict.fromkeys(PAGES_AXES, (torch.int32,)),
    reference=paged_select_entries,
)
