"""paged_sparse_latent_attention@1: causal attention of this step's queries over selected latents in the pages of a
cache: formula in `precast.kernels.sparse_attention.attend_selected`.

A slot of the cache holds a token's latent, then the rope part of its keys. Sequences, pages and positions are those of
`precast.kernels.attention.paged`; `selected` has absolute positions. Tokens past `cu_seqlens[B]` are padding, and give
zeros.
"""

from __future__ import annotations

import torch

from precast.kernels.attention.attend import Pages
from precast.kernels.attention.paged import PAGES_AXES, each_sequence
from precast.kernels.calls import implements
from precast.kernels.dtypes import FLOAT
from precast.kernels.latent_attention.expand import sizes_of
from precast.kernels.sparse_attention.attend_selected import Kept, attend_selected
from precast.kernels.spec import PRODUCT, OpSpec
from precast.kernels.storage import STORED, gathered


@implements("paged_sparse_latent_attention")
def paged_sparse_latent_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    weight: torch.Tensor,
    selected: torch.Tensor,
    sinks: torch.Tensor | None,
    pages: Pages,
    value_size: int,
    scale: float,
) -> torch.Tensor:
    """`q` [1, T, H, Dn + Dr], `cache` [P, S, C + Dr], `weight` [H * (Dn + Dv), C], `selected` [1, T, M] int32,
    `sinks` [H], `value_size` Dv; [1, T, H, Dv].

    A cache of another dtype, float8_e4m3fn too, is converted as it is read. Computed in float32, rounded once to q's
    dtype. Raises ValueError for a weight that doesn't fit the heads.
    """
    sizes = sizes_of(q, weight, cache.shape[-1] - weight.shape[1], value_size)
    out = q.new_zeros((*q.shape[:-1], value_size))
    starts = pages.page_start.tolist()
    for start, (rows, queries, keys, held) in zip(starts, each_sequence(pages, q.device), strict=True):
        kept = Kept(gathered(cache, held).flatten(0, 1)[: len(keys)], start)
        out[0, rows] = attend_selected(q[0, rows], kept, selected[0, rows], queries, weight, sinks, sizes, scale)
    return out


PAGED_SPARSE_LATENT_ATTENTION = OpSpec(
    name="precast.paged_sparse_latent_attention",
    axes={"q": "1 T H D", "cache": "P S L", "weight": "W C", "selected": "1 T M", "sinks": "H", **PAGES_AXES},
    results={"y": "1 T H E"},
    dtypes={"q": FLOAT, "cache": STORED, "weight": FLOAT, "sinks": FLOAT}
    | dict.fromkeys(("selected", *PAGES_AXES), (torch.int32,)),
    reference=paged_sparse_latent_attention,
    tolerances=PRODUCT,
)
