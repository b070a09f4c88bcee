"""paged_latent_attention@1: causal attention of this step's queries over the latents in the pages of a cache: formulas
in `precast.kernels.latent_attention.expand` and `precast.kernels.attention.attend`.

A slot of the cache holds a token's latent, then the rope part of its keys. Sequences, pages and positions are
those of `precast.kernels.attention.paged`. Tokens past `cu_seqlens[B]` are padding, and give zeros.
"""

from __future__ import annotations

import torch

from precast.kernels.attention.attend import Pages, Scoring, attend, check_window
from precast.kernels.attention.paged import PAGES_AXES, each_sequence
from precast.kernels.calls import implements
from precast.kernels.dtypes import FLOAT, widened
from precast.kernels.latent_attention.expand import LatentScoring, expand, sizes_of
from precast.kernels.spec import PRODUCT, OpSpec
from precast.kernels.storage import STORED, gathered


@implements("paged_latent_attention")
def paged_latent_attention(
    q: torch.Tensor, cache: torch.Tensor, weight: torch.Tensor, pages: Pages, value_size: int, scoring: LatentScoring
) -> torch.Tensor:
    """`q` [1, T, H, Dn + Dr], `cache` [P, S, C + Dr], `weight` [H * (Dn + Dv), C], `value_size` Dv; [1, T, H, Dv].

    A cache of another dtype, float8_e4m3fn too, is converted as it is read. Computed in float32, rounded once to q's
    dtype. Raises ValueError for a window below 1, and for a weight that doesn't fit the heads.
    """
    check_window(scoring.window)
    sizes = sizes_of(q, weight, cache.shape[-1] - weight.shape[1], value_size)
    out = q.new_zeros((*q.shape[:-1], value_size))
    for rows, queries, keys, held in each_sequence(pages, q.device):
        # What lies past the last key was never written, or by another sequence: it must not enter any product.
        kept = gathered(cache, held).flatten(0, 1)[: len(keys)].to(widened(q).dtype)
        k, v = expand(kept[:, : sizes.latent], kept[:, sizes.latent :], weight.to(kept.dtype), sizes)
        out[0, rows] = attend(q[0, rows], k, v, queries, keys[: len(k)], Scoring(*scoring))
    return out


PAGED_LATENT_ATTENTION = OpSpec(
    name="precast.paged_latent_attention",
    axes={"q": "1 T H D", "cache": "P S L", "weight": "W C", **PAGES_AXES},
    results={"y": "1 T H E"},
    dtypes={"q": FLOAT, "cache": STORED, "weight": FLOAT} | dict.fromkeys(PAGES_AXES, (torch.int32,)),
    reference=paged_latent_attention,
    tolerances=PRODUCT,
)
