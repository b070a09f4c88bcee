"""block_sparse_attention@1: causal attention over selected blocks of keys of packed sequences, formula in
`precast.kernels.block_sparse_attention.attend_blocks`.

Tokens `cu_seqlens[b] .. cu_seqlens[b + 1]` are sequence b: its queries and its keys; blocks count from its first token.
Tokens past `cu_seqlens[B]` are padding, and give zeros.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from precast.kernels.block_sparse_attention.attend_blocks import Blocks, Held, attend_blocks
from precast.kernels.calls import implements
from precast.kernels.dtypes import FLOAT
from precast.kernels.spec import PRODUCT, OpSpec


@implements("block_sparse_attention")
def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    selected: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    blocks: Blocks,
) -> torch.Tensor:
    """`q` [1, T, H, D], `k` [1, T, K, D], `v` [1, T, K, Dv], `selected` [1, T, G, M] int32, `cu_seqlens` [B + 1] int32;
    [1, T, H, Dv].

    Computed in float32, rounded once to q's dtype.
    """
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    for first, end in pairwise(cu_seqlens.tolist()):
        rows, queries = slice(first, end), torch.arange(end - first, device=q.device)
        held = Held(k[0, rows], v[0, rows], 0)
        out[0, rows] = attend_blocks(q[0, rows], held, selected[0, rows], queries, scale, blocks)
    return out


BLOCK_SPARSE_ATTENTION = OpSpec(
    name="precast.block_sparse_attention",
    axes={"q": "1 T H D", "k": "1 T K D", "v": "1 T K E", "selected": "1 T G M", "cu_seqlens": "B+1"},
    results={"y": "1 T H E"},
    dtypes={
        **dict.fromkeys(("q", "k", "v"), FLOAT),
        **dict.fromkeys(("selected", "cu_seqlens"), (torch.int32,)),
    },
    reference=block_sparse_attention,
    tolerances=PRODUCT,
)
