"""entry_attention@1: attention of packed sequences over entries, formula in `precast.kernels.entries.attend`.

Tokens `cu_seqlens[b] .. cu_seqlens[b + 1]` are sequence b: its queries, and its entries, each of which stands at the
last token of its block. What stands at other tokens isn't read. `selected` has numbers of entries, counted from the
sequence's first. Tokens past `cu_seqlens[B]` are padding, and give zeros, and -inf for `lse`.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from precast.kernels.calls import implements
from precast.kernels.dtypes import FLOAT
from precast.kernels.entries.attend import Found, Kept, Rule, attend
from precast.kernels.spec import PRODUCT, OpSpec
from precast.kernels.stateful.walks import computed_in


@implements("entry_attention")
def entry_attention(
    q: torch.Tensor, entries: torch.Tensor, selected: torch.Tensor | None, cu_seqlens: torch.Tensor, rule: Rule
) -> Found:
    """`q` [1, T, H, D], `entries` [1, T, D], `selected` [1, T, M] int32, `cu_seqlens` [B + 1] int32; [1, T, H, D] and
    [1, T, H], in float32, or float64 for queries of it."""
    y = q.new_zeros(q.shape, dtype=computed_in(q))
    lse = y.new_full(q.shape[:3], -torch.inf)
    for first, end in pairwise(cu_seqlens.tolist()):
        rows, queries = slice(first, end), torch.arange(end - first, device=q.device)
        own = Kept(entries[0, rows][rule.rate - 1 :: rule.rate], 0)
        named = None if selected is None else selected[0, rows]
        y[0, rows], lse[0, rows] = attend(q[0, rows], own, named, queries, rule)
    return y, lse


ENTRY_ATTENTION = OpSpec(
    name="precast.entry_attention",
    axes={"q": "1 T H D", "entries": "1 T D", "selected": "1 T M", "cu_seqlens": "B+1"},
    results={"y": "1 T H D", "lse": "1 T H"},
    dtypes={"q": FLOAT, "entries": FLOAT, "selected": (torch.int32,), "cu_seqlens": (torch.int32,)},
    reference=entry_attention,
    tolerances=PRODUCT,
    products_of="q",
)
