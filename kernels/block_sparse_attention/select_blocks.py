"""select_blocks@1: the blocks of keys that each query of packed sequences selects, formula in
`precast.kernels.block_sparse_attention.select`.

Tokens `cu_seqlens[b] .. cu_seqlens[b + 1]` are sequence b: its queries and its keys; blocks count from its first token.
Tokens past `cu_seqlens[B]` are padding, and select nothing: -1.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from precast.kernels.block_sparse_attention.select import Blocks, select
from precast.kernels.calls import implements
from precast.kernels.dtypes import FLOAT
from precast.kernels.spec import OpSpec


@implements("select_blocks")
def select_blocks(
    q: torch.Tensor, k: torch.Tensor, cu_seqlens: torch.Tensor, count: int, block_size: int, local: int
) -> torch.Tensor:
    """`q` [1, T, G, D], `k` [1, T, D], `cu_seqlens` [B + 1] int32; [1, T, G, count] int32.

    Computed in float32, or float64 for queries of it.
    """
    found = q.new_full((*q.shape[:3], count), -1, dtype=torch.int32)
    for first, end in pairwise(cu_seqlens.tolist()):
        rows, queries = slice(first, end), torch.arange(end - first, device=q.device)
        found[0, rows] = select(q[0, rows], k[0, rows], queries, 0, Blocks(count, block_size, local))
    return found


SELECT_BLOCKS = OpSpec(
    name="precast.select_blocks",
    axes={"q": "1 T G D", "k": "1 T D", "cu_seqlens": "B+1"},
    results={"selected": "1 T G M"},
    dtypes={"q": FLOAT, "k": FLOAT, "cu_seqlens": (torch.int32,)},
    reference=select_blocks,
)
