"""attention@1: causal attention over packed sequences, formula in `precast.kernels.attention.attend`.

Tokens `cu_seqlens[b] .. cu_seqlens[b + 1]` are sequence b: its queries and its keys. Tokens past `cu_seqlens[B]` are
padding, and give zeros.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from precast.kernels.attention.attend import Scoring, attend, check_window
from precast.kernels.calls import implements
from precast.kernels.dtypes import FLOAT
from precast.kernels.spec import PRODUCT, OpSpec


@implements("attention")
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """`q` [1, T, H, D], `k` [1, T, K, D], `v` [1, T, K, Dv], `sinks` [H], `cu_seqlens` [B + 1] int32; [1, T, H, Dv].

    `slopes` [H] float32, `bias` [1, T, H, R]. Computed in float32, rounded once to q's dtype. Raises ValueError for a
    window or chunk below 1, and for both at once.
    """
    check_window(scoring.window, scoring.chunk)
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    for first, end in pairwise(cu_seqlens.tolist()):
        positions = torch.arange(end - first, device=q.device)
        rows = slice(first, end)
        out[0, rows] = attend(q[0, rows], k[0, rows], v[0, rows], positions, positions, scoring.of(rows))
    return out


ATTENTION = OpSpec(
    name="precast.attention",
    axes={
        "q": "1 T H D",
        "k": "1 T K D",
        "v": "1 T K E",
        "sinks": "H",
        "cu_seqlens": "B+1",
        "slopes": "H",
        "bias": "1 T H R",
    },
    results={"y": "1 T H E"},
    dtypes=dict.fromkeys(("q", "k", "v", "sinks", "bias"), FLOAT)
    | {"cu_seqlens": (torch.int32,), "slopes": (torch.float32,)},
    reference=attention,
    tolerances=PRODUCT,
)  # fmt: skip
