"""paged_entry_attention@1: attention of this step's queries over the entries in the pages of a cache, formula in
`precast.kernels.entries.attend`.

A page has an entry for each `rate` of its places for tokens. Sequences, pages and positions are those of
`precast.kernels.attention.paged`; `selected` has numbers of entries, counted from the sequence's first. Tokens past
`cu_seqlens[B]` are padding, and give zeros, and -inf for `lse`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from precast.kernels.attention.attend import Pages
from precast.kernels.attention.paged import PAGES_AXES, each_sequence
from precast.kernels.calls import implements
from precast.kernels.dtypes import FLOAT
from precast.kernels.entries.attend import Found, Kept, Rule, attend
from precast.kernels.spec import PRODUCT, OpSpec
from precast.kernels.stateful.walks import computed_in
from precast.kernels.storage import STORED, gathered


@implements("paged_entry_attention")
def paged_entry_attention(
    q: torch.Tensor, cache: torch.Tensor, selected: torch.Tensor | None, pages: Pages, rule: Rule
) -> Found:
    """`q` [1, T, H, D], `cache` [P, S / rate, D], `selected` [1, T, M] int32; [1, T, H, D] and [1, T, H], in float32,
    or float64 for queries of it.

    A cache of another dtype, float8_e4m3fn too, is converted as it is read.
    """
    y = q.new_zeros(q.shape, dtype=computed_in(q))
    lse = y.new_full(q.shape[:3], -torch.inf)
    for rows, queries, kept in each_kept(cache, pages, rule.rate):
        named = None if selected is None else selected[0, rows]
        y[0, rows], lse[0, rows] = attend(q[0, rows], kept, named, queries, rule)
    return y, lse


def each_kept(cache: torch.Tensor, pages: Pages, rate: int) -> Iterator[tuple[slice, torch.Tensor, Kept]]:
    """Each sequence's tokens, their positions, and its entries. What lies past the last block that is whole was never
    written, or by another sequence: it must not enter any product."""
    starts = pages.page_start.tolist()
    for start, (rows, queries, keys, held) in zip(starts, each_sequence(pages, cache.device), strict=True):
        count = (start + len(keys)) // rate - start // rate
        yield rows, queries, Kept(gathered(cache, held).flatten(0, 1)[:count], start // rate)


PAGED_ENTRY_ATTENTION = OpSpec(
    name="precast.paged_entry_attention",
    axes={"q": "1 T H D", "cache": "P S D", "selected": "1 T M", **PAGES_AXES},
    results={"y": "1 T H D", "lse": "1 T H"},
    dtypes={"q": FLOAT, "cache": STORED} | dict.fromkeys(("selected", *PAGES_AXES), (torch.int32,)),
    reference=paged_entry_attention,
    tolerances=PRODUCT,
    products_of="q",
)
