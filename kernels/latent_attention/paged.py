"""paged_latent_attention@1: causal attention of this step's queries over the latents in the pages of a cache: formulas
in `precast.kernels.latent_attention.expand` and `precast.kernels.attention.attend`.

A slot of the cache holds a token's latent and behind it the rope part of its keys. Sequences, pages and positions are
those of `precast.kernels.attention.paged`. Tokens past `cu_seqlens[B]` are padding, and give zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from precast.kernels.attention.attend import Pages, Scoring, attend, check_window
from precast.kernels.attention.paged import PAGES_AXES, each_sequence, paged_sample
from precast.kernels.calls import implements
from precast.kernels.dtypes import FLOAT, widened
from precast.kernels.latent_attention.expand import LatentScoring, expand, sizes_of
from precast.kernels.spec import PRODUCT, Draw, OpSpec, Sample
from precast.kernels.storage import STORED, gathered


@implements("paged_latent_attention")
def paged_latent_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    weight: torch.Tensor,
    pages: Pages,
    value_size: int,
    scoring: LatentScoring,
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


def paged_latent_sample(
    draw: Draw,
    sequences: list[tuple[int, int]],
    *,
    heads: int,
    nope: int,
    rope: int,
    latent: int,
    value: int,
    **more: Any,
) -> Sample:
    """A call for `sequences`, with the pages, the NaN and the missing page of `paged_sample`."""
    paged = paged_sample(draw, sequences, heads=1, kv_heads=1, size=latent + rope, **more)
    cache, padding = paged["k_cache"], paged["q"].isnan().any(-1, keepdim=True)
    q = draw.normal(1, padding.shape[1], heads, nope + rope)
    for name in ("q", "k_cache", "v_cache", "sinks"):
        del paged[name]
    return {
        "q": torch.where(padding, float("nan"), q),
        "cache": cache[:, :, 0],
        "weight": draw.normal(heads * (nope + value), latent, scale=latent**-0.5),
        **paged,
        "scale": (nope + rope) ** -0.5,
        "value_size": value,
    }


def _samples(draw: Draw) -> Iterator[Sample]:
    decode = [(1, 7), (1, 1), (1, 30), (1, 12)]
    mixed = [(5, 5), (1, 9), (3, 20), (0, 6), (27, 27), (14, 31)]
    # Of so few elements a latent that many queries at once are computed from it, and of so many that none are.
    small: dict[str, int] = {"heads": 3, "nope": 12, "rope": 6, "latent": 10, "value": 14}
    large: dict[str, int] = {"heads": 2, "nope": 5, "rope": 4, "latent": 40, "value": 7}
    yield paged_latent_sample(draw, decode, **large)
    yield paged_latent_sample(draw, decode, **small, page_size=1, padding=2)
    yield paged_latent_sample(draw, mixed, **large, page_size=3, padding=4)
    yield paged_latent_sample(draw, mixed, **small, page_size=16)
    yield paged_latent_sample(draw, mixed, **large, window=4, cut=True)
    yield paged_latent_sample(draw, [(27, 27), (14, 31)], **large, window=1000, padding=1)
    yield paged_latent_sample(draw, mixed, **large, cache_dtype=torch.float16)
    eight: dict[str, Any] = {"cache_dtype": torch.float8_e4m3fn, "cut": True}
    yield paged_latent_sample(draw, decode, **large, page_size=3, **eight)
    yield paged_latent_sample(draw, mixed, **small, window=20, padding=2, **eight)
    yield paged_latent_sample(draw, mixed, heads=1, nope=1, rope=2, latent=3, value=1)
    # Nothing to see: an empty context, a query before the first key, and no sequences at all.
    yield paged_latent_sample(draw, [(1, 3), (2, 2)], **large, kv_lens=draw.of([0, 1], torch.int32))
    yield paged_latent_sample(draw, [], **large, padding=3)
    yield paged_latent_sample(draw, [], **large)


PAGED_LATENT_ATTENTION = OpSpec(
    name="precast.paged_latent_attention",
    axes={
        "q": "1 T H D",
        "cache": "P S L",
        "weight": "W C",
        **PAGES_AXES,
    },
    results={"y": "1 T H E"},
    dtypes={"q": FLOAT, "cache": STORED, "weight": FLOAT} | dict.fromkeys(PAGES_AXES, (torch.int32,)),
    reference=paged_latent_attention,
    samples=_samples,
    tolerances=PRODUCT,
)
