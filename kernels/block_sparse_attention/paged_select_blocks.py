"""paged_select_blocks@1: the blocks of keys that each of this step's queries selects among those in the pages of a
cache, formula in `precast.kernels.block_sparse_attention.select`.

A slot of the cache holds the key of a token, which all heads share. Sequences, pages and positions are those of
`precast.kernels.attention.paged`; blocks count from position 0, whatever pages hold them. Tokens past `cu_seqlens[B]`
are padding, and select nothing: -1.
"""

from __future__ import annotations

import torch

from precast.kernels.attention.attend import Pages
from precast.kernels.attention.paged import PAGES_AXES, each_sequence
from precast.kernels.block_sparse_attention.select import Blocks, select
from precast.kernels.calls import implements
from precast.kernels.dtypes import FLOAT
from precast.kernels.spec import OpSpec
from precast.kernels.storage import STORED, gathered


@implements("paged_select_blocks")
def paged_select_blocks(
    q: torch.Tensor, cache: torch.Tensor, pages: Pages, count: int, block_size: int, local: int
) -> torch.Tensor:
    """`q` [1, T, G, D], `cache` [P, S, D]; [1, T, G, count] int32.

    A cache of another dtype, float8_e4m3fn too, is converted as it is read. Computed in float32, or float64 for queries
    of it.
    """
    found = q.new_full((*q.shape[:3], count), -1, dtype=torch.int32)
    starts = pages.page_start.tolist()
    for start, (rows, queries, keys, held) in zip(starts, each_sequence(pages, q.device), strict=True):
        # What lies past the last key was never written, or by another sequence: it must not be scored.
        k = gathered(cache, held).flatten(0, 1)[: len(keys)]
        found[0, rows] = select(q[0, rows], k, queries, start, Blocks(count, block_size, local))
    return found


PAGED_SELECT_BLOCKS = OpSpec(
    name="precast.paged_select_blocks",
    axes={"q": "1 T G D", "cache": "P S D", **PAGES_AXES},
    results={"selected": "1 T G M"},
    dtypes={"q": FLOAT, "cache": STORED} | dict.fromkeys(PAGES_AXES, (torch.int32,)),
    reference=paged_select_blocks,
)
