"""select_keys@1: the keys that each query of packed sequences selects, formula in
`precast.kernels.sparse_attention.select`.

Tokens `cu_seqlens[b] .. cu_seqlens[b + 1]` are sequence b: its queries and its keys; positions count from its first
token. Tokens past `cu_seqlens[B]` are padding, and select nothing: -1.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from precast.kernels.calls import implements
from precast.kernels.dtypes import FLOAT
from precast.kernels.sparse_attention.select import select
from precast.kernels.spec import OpSpec


@implements("select_keys")
def select_keys(
    q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, cu_seqlens: torch.Tensor, scale: float, count: int
) -> torch.Tensor:
    """`q` [1, T, H, D], `k` [1, T, D], `weights` [1, T, H] float32, `cu_seqlens` [B + 1] int32; [1, T, count] int32."""
    found = q.new_full((*q.shape[:2], count), -1, dtype=torch.int32)
    for first, end in pairwise(cu_seqlens.tolist()):
        rows, positions = slice(first, end), torch.arange(end - first, device=q.device)
        found[0, rows] = select(q[0, rows], weights[0, rows], k[0, rows], positions, positions, scale, count)
    return found


SELECT_KEYS = OpSpec(
    name="precast.select_keys",
    axes={"q": "1 T H D", "k": "1 T D", "weights": "1 T H", "cu_seqlens": "B+1"},
    results={"selected": "1 T M"},
    dtypes={"q": FLOAT, "k": FLOAT, "weights": (torch.float32,), "cu_seqlens": (torch.int32,)},
    reference=select_keys,
)
