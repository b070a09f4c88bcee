"""latent_attention@1: causal attention over packed sequences, keys and values made from latents: formulas in
`precast.kernels.latent_attention.expand` and `precast.kernels.attention.attend`.

Tokens `cu_seqlens[b] .. cu_seqlens[b + 1]` are sequence b: its queries and its keys. Tokens past `cu_seqlens[B]` are
padding, and give zeros.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from precast.kernels.attention.attend import Scoring, attend, check_window
from precast.kernels.calls import implements
from precast.kernels.dtypes import FLOAT, widened
from precast.kernels.latent_attention.expand import LatentScoring, expand, sizes_of
from precast.kernels.spec import PRODUCT, OpSpec


@implements("latent_attention")
def latent_attention(
    q: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    weight: torch.Tensor,
    cu_seqlens: torch.Tensor,
    value_size: int,
    scoring: LatentScoring,
) -> torch.Tensor:
    """`q` [1, T, H, Dn + Dr], `latent` [1, T, C], `k_rope` [1, T, Dr], `weight` [H * (Dn + Dv), C], `value_size` Dv,
    `cu_seqlens` [B + 1] int32; [1, T, H, Dv].

    Computed in float32, rounded once to q's dtype. Raises ValueError for a window below 1, and for a weight that
    doesn't fit the heads.
    """
    check_window(scoring.window)
    sizes = sizes_of(q, weight, k_rope.shape[-1], value_size)
    out = q.new_zeros((*q.shape[:-1], value_size))
    for first, end in pairwise(cu_seqlens.tolist()):
        rows = slice(first, end)
        k, v = expand(widened(latent[0, rows]), widened(k_rope[0, rows]), widened(weight), sizes)
        positions = torch.arange(end - first, device=q.device)
        out[0, rows] = attend(q[0, rows], k, v, positions, positions, Scoring(*scoring))
    return out


LATENT_ATTENTION = OpSpec(
    name="precast.latent_attention",
    axes={"q": "1 T H D", "latent": "1 T C", "k_rope": "1 T R", "weight": "W C", "cu_seqlens": "B+1"},
    results={"y": "1 T H E"},
    dtypes={"q": FLOAT, "latent": FLOAT, "k_rope": FLOAT, "weight": FLOAT, "cu_seqlens": (torch.int32,)},
    reference=latent_attention,
    tolerances=PRODUCT,
)
