"""select_entries@1: the entries that each query of packed sequences selects, as of keys in
`precast.kernels.sparse_attention.select`, where query i sees the entries `e < (i + 1) // rate`.

Tokens `cu_seqlens[b] .. cu_seqlens[b + 1]` are sequence b: its queries, and its entries, each of which stands at the
last token of its block. What stands at other tokens isn't read. What is selected are numbers of entries, counted from
the sequence's first. Tokens past `cu_seqlens[B]` are padding, and select nothing: -1.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from precast.kernels.calls import implements
from precast.kernels.dtypes import FLOAT
from precast.kernels.sparse_attention.select import select
from precast.kernels.spec import OpSpec


@implements("select_entries")
def select_entries(
    q: torch.Tensor, entries: torch.Tensor, weights: torch.Tensor, cu_seqlens: torch.Tensor, scale: float, rate: int,
    count: int,
) -> torch.Tensor:  # fmt: skip
    """`q` [1, T, H, D], `entries` [1, T, D], `weights` [1, T, H] float32, `cu_seqlens` [B + 1] int32; [1, T, count]
    int32."""
    found = q.new_full((*q.shape[:2], count), -1, dtype=torch.int32)
    for first, end in pairwise(cu_seqlens.tolist()):
        rows, queries = slice(first, end), torch.arange(end - first, device=q.device)
        k = entries[0, rows][rate - 1 :: rate]
        found[0, rows] = select(q[0, rows], weights[0, rows], k, last_seen(queries, rate), numbers(k, 0), scale, count)
    return found


def last_seen(queries: torch.Tensor, rate: int) -> torch.Tensor:
    """The last entry that a query at each of these positions sees; -1 where it sees none."""
    return (queries + 1) // rate - 1


def numbers(entries: torch.Tensor, first: int) -> torch.Tensor:
    """The numbers of these entries [L, D], of which the first one's is given."""
    return torch.arange(first, first + len(entries), device=entries.device)


SELECT_ENTRIES = OpSpec(
    name="precast.select_entries",
    axes={"q": "1 T H D", "entries": "1 T D", "weights": "1 T H", "cu_seqlens": "B+1"},
    results={"selected": "1 T M"},
    dtypes={"q": FLOAT, "entries": FLOAT, "weights": (torch.float32,), "cu_seqlens": (torch.int32,)},
    reference=select_entries,
)
