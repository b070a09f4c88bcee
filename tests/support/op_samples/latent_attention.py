"""Samples of latent attention, over packed tokens and over pages, and of writes into pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from op_samples.attention import paged_sample
from op_samples.draw import Draw, Sample


def latent_attention(draw: Draw) -> Iterator[Sample]:
    def sample(
        lengths: list[int], heads: int, nope: int, rope: int, latent: int, value: int, padding: int, **more: Any
    ) -> Sample:
        bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        tokens = bounds[-1] + padding
        return {
            "q": draw.normal(1, tokens, heads, nope + rope),
            "latent": draw.normal(1, tokens, latent),
            "k_rope": draw.normal(1, tokens, rope),
            "weight": draw.normal(heads * (nope + value), latent, scale=latent**-0.5),
            "cu_seqlens": draw.of(bounds, torch.int32),
            "scale": (nope + rope) ** -0.5,
            "value_size": value,
            **more,
        }

    yield sample([5, 1, 9], 4, 12, 4, 20, 16, 0)
    yield sample([5, 0, 17], 3, 10, 6, 24, 14, 3, window=4)
    yield sample([33], 1, 7, 2, 5, 40, 1, window=1)
    yield sample([2, 3], 2, 3, 8, 64, 1, 2, window=100)
    yield sample([], 2, 8, 4, 8, 8, 3)
    yield sample([], 2, 8, 4, 8, 8, 0)
    # Latent and rope part as slices of the product that gives both.
    fused = draw.normal(1, 7, 26)
    sliced = {"latent": fused[..., :20], "k_rope": fused[..., 20:]}
    yield sample([3, 4], 2, 8, 6, 20, 8, 0) | sliced


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


def paged_latent_attention(draw: Draw) -> Iterator[Sample]:
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


def write_latent(draw: Draw) -> Iterator[Sample]:
    def sample(slots: list[int], pages: int, page_size: int, latent: int, rope: int, dtype: torch.dtype) -> Sample:
        return {
            "latent": draw.normal(1, len(slots), latent),
            "k_rope": draw.normal(1, len(slots), rope),
            "cache": draw.normal(pages, page_size, latent + rope, dtype=dtype),
            "slot_mapping": draw.of(slots, torch.int64),
        }

    yield sample([9, 0, 4, 14], 5, 3, 8, 4, draw.dtype)
    yield sample([-1, 7, -1, 0, 2, -1], 2, 4, 5, 3, draw.dtype)
    yield sample([-1, 7, -1, 5, 2, -1], 2, 4, 5, 3, draw.dtype)
    yield sample([-1, -1], 2, 4, 5, 3, draw.dtype)
    yield sample([], 2, 4, 5, 3, draw.dtype)
    yield sample([-1], 0, 4, 5, 3, draw.dtype)
    yield sample([3, -1, 0], 1, 4, 16, 2, torch.bfloat16)
    # Above what a float8 can hold, too.
    steep = sample([3, -1, 0, 7], 3, 4, 11, 6, torch.float8_e4m3fn)
    yield steep | {"latent": draw.normal(1, 4, 11, scale=300.0), "k_rope": draw.normal(1, 4, 6, scale=1e-2)}
    # Latent and rope part as slices of the product that gives both.
    fused = draw.normal(1, 3, 12)
    yield sample([1, -1, 2], 2, 2, 8, 4, draw.dtype) | {"latent": fused[..., :8], "k_rope": fused[..., 8:]}


SAMPLES = {
    ("precast.latent_attention", 1): latent_attention,
    ("precast.paged_latent_attention", 1): paged_latent_attention,
    ("precast.write_latent", 1): write_latent,
}
