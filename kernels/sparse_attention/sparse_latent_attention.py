"""sparse_latent_attention@1: causal attention over selected keys of packed sequences, keys and values made from
latents: formula in `precast.kernels.sparse_attention.attend_selected`.

Tokens `cu_seqlens[b] .. cu_seqlens[b + 1]` are sequence b: its queries and its keys; `selected` has positions from its
first token on. Tokens past `cu_seqlens[B]` are padding, and give zeros.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from precast.kernels.calls import implements
from precast.kernels.dtypes import FLOAT
from precast.kernels.latent_attention.expand import sizes_of
from precast.kernels.sparse_attention.attend_selected import Kept, attend_selected
from precast.kernels.spec import PRODUCT, OpSpec


@implements("sparse_latent_attention")
def sparse_latent_attention(
    q: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    weight: torch.Tensor,
    selected: torch.Tensor,
    sinks: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    value_size: int,
    scale: float,
) -> torch.Tensor:
    """`q` [1, T, H, Dn + Dr], `latent` [1, T, C], `k_rope` [1, T, Dr], `weight` [H * (Dn + Dv), C], `selected`
    [1, T, M] int32, `sinks` [H], `cu_seqlens` [B + 1] int32, `value_size` Dv; [1, T, H, Dv].

    Computed in float32, rounded once to q's dtype. Raises ValueError for a weight that doesn't fit the heads.
    """
    sizes = sizes_of(q, weight, k_rope.shape[-1], value_size)
    out = q.new_zeros((*q.shape[:-1], value_size))
    kept = torch.cat((latent, k_rope), dim=-1)
    for first, end in pairwise(cu_seqlens.tolist()):
        rows, queries = slice(first, end), torch.arange(end - first, device=q.device)
        own = Kept(kept[0, rows], 0)
        out[0, rows] = attend_selected(q[0, rows], own, selected[0, rows], queries, weight, sinks, sizes, scale)
    return out


SPARSE_LATENT_ATTENTION = OpSpec(
    name="precast.sparse_latent_attention",
    axes={
        "q": "1 T H D", "latent": "1 T C", "k_rope": "1 T R", "weight": "W C", "selected": "1 T M", "sinks": "H",
        "cu_seqlens": "B+1",
    },
    results={"y": "1 T H E"},
    dtypes={
        **dict.fromkeys(("q", "latent", "k_rope", "weight", "sinks"), FLOAT),
        **dict.fromkeys(("selected", "cu_seqlens"), (torch.int32,)),
    },
    reference=sparse_latent_attention,
    tolerances=PRODUCT,
)  # fmt: skip
