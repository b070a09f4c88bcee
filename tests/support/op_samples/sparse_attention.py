"""Samples of sparse attention: of the selection of keys, of attention to selected latents, and of writes of keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from op_samples.attention import paged_sample
from op_samples.draw import Draw, Sample
from op_samples.latent_attention import paged_latent_sample

DECODE = [(1, 7), (1, 1), (1, 30), (1, 12)]
MIXED = [(5, 5), (1, 9), (3, 20), (0, 6), (27, 27), (14, 31)]


def whole_numbers(draw: Draw, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """From -2 to 2: sums of their products are exact in any order, and many of them equal."""
    return draw.integers(-2, 3, *shape, dtype=dtype or draw.dtype)


def select_keys(draw: Draw) -> Iterator[Sample]:
    def sample(lengths: list[int], heads: int, size: int, count: int, padding: int, *, whole: bool = False) -> Sample:
        bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        tokens = bounds[-1] + padding
        shapes = {"q": (1, tokens, heads, size), "k": (1, tokens, size), "weights": (1, tokens, heads)}
        make = whole_numbers if whole else Draw.normal
        tensors = {name: make(draw, *shape) for name, shape in shapes.items()}
        return {
            **tensors,
            "weights": tensors["weights"].float(),
            "cu_seqlens": draw.of(bounds, torch.int32),
            "scale": 0.25,
            "count": count,
        }

    yield sample([5, 1, 9], 4, 16, 3, 0)
    yield sample([5, 0, 17], 3, 10, 4, 3)
    yield sample([33], 1, 24, 1, 1)
    yield sample([2, 3], 2, 8, 100, 2)
    yield sample([19, 6], 2, 5, 7, 0, whole=True)
    yield sample([], 2, 8, 4, 3)
    yield sample([], 2, 8, 4, 0)
    # Queries, keys and weights as slices of one product.
    fused = draw.normal(1, 7, 40)
    sliced = {"q": fused[..., :24].view(1, 7, 3, 8), "k": fused[..., 24:32], "weights": fused[..., 32:35].float()}
    yield sample([3, 4], 3, 8, 2, 0) | sliced


def paged_select_sample(
    draw: Draw,
    sequences: list[tuple[int, int]],
    *,
    heads: int,
    size: int,
    count: int,
    whole: bool = False,
    **more: Any,
) -> Sample:
    """A call for `sequences`, with the pages, the NaN and the missing page of `paged_sample`."""
    paged = paged_sample(draw, sequences, heads=heads, kv_heads=1, size=size, **more)
    cache, q = paged["k_cache"][:, :, 0], paged["q"]
    for name in ("q", "k_cache", "v_cache", "sinks"):
        del paged[name]
    weights = draw.normal(*q.shape[:3], dtype=torch.float32)
    if whole:
        weights = whole_numbers(draw, *q.shape[:3], dtype=torch.float32)
        cache = torch.where(cache.isnan(), cache.float(), whole_numbers(draw, *cache.shape).float()).to(cache.dtype)
        q = torch.where(q.isnan(), q, whole_numbers(draw, *q.shape))
    weights = torch.where(q[..., 0].isnan(), float("nan"), weights)
    return {"q": q, "cache": cache, "weights": weights, **paged, "scale": 0.25, "count": count}


def paged_select_keys(draw: Draw) -> Iterator[Sample]:
    yield paged_select_sample(draw, DECODE, heads=4, size=16, count=5)
    yield paged_select_sample(draw, DECODE, heads=3, size=10, count=1, page_size=1, padding=2)
    yield paged_select_sample(draw, MIXED, heads=7, size=40, count=6, page_size=3, padding=4)
    yield paged_select_sample(draw, MIXED, heads=2, size=8, count=64, page_size=16)
    yield paged_select_sample(draw, MIXED, heads=5, size=12, count=9, cache_dtype=torch.float16)
    for sequences in (DECODE, MIXED):
        yield paged_select_sample(draw, sequences, heads=2, size=5, count=4, whole=True, padding=1)
    yield paged_select_sample(draw, [(3, 200), (1, 131)], heads=1, size=3, count=17, whole=True, page_size=8)
    eight: dict[str, Any] = {"cache_dtype": torch.float8_e4m3fn}
    yield paged_select_sample(draw, DECODE, heads=4, size=16, count=3, page_size=3, **eight)
    yield paged_select_sample(draw, MIXED, heads=4, size=16, count=8, padding=2, whole=True, **eight)
    # Nothing to see: an empty context, a query before the first key, and no sequences at all.
    nothing = draw.of([0, 1], torch.int32)
    yield paged_select_sample(draw, [(1, 3), (2, 2)], heads=2, size=8, count=2, kv_lens=nothing)
    yield paged_select_sample(draw, [], heads=2, size=8, count=2, padding=3)
    yield paged_select_sample(draw, [], heads=2, size=8, count=2)


def chosen_keys(draw: Draw, sequences: list[tuple[int, int]], count: int, padding: int) -> torch.Tensor:
    """Positions of up to `count` keys that each query sees, ascending, then -1; some are left out, and padding's are of
    keys too."""
    rows = []
    for queries, kv_len in sequences:
        for position in range(kv_len - queries, kv_len):
            kept = draw.permutation(max(position + 1, 0))[: max(count - position % 3, 1)].tolist()
            rows.append(sorted(kept) + [-1] * (count - len(kept)))
    rows += [list(range(count))] * padding
    return draw.of(rows, torch.int32).view(1, len(rows), count)


def sparse_latent_attention(draw: Draw) -> Iterator[Sample]:
    def sample(lengths: list[int], heads: int, nope: int, rope: int, latent: int, value: int, count: int,
               padding: int, sinks: bool = False) -> Sample:  # fmt: skip
        bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        tokens = bounds[-1] + padding
        return {
            "q": draw.normal(1, tokens, heads, nope + rope),
            "latent": draw.normal(1, tokens, latent),
            "k_rope": draw.normal(1, tokens, rope),
            "weight": draw.normal(heads * (nope + value), latent, scale=latent**-0.5),
            "selected": chosen_keys(draw, [(length, length) for length in lengths], count, padding),
            "sinks": draw.normal(heads) if sinks else None,
            "cu_seqlens": draw.of(bounds, torch.int32),
            "scale": (nope + rope) ** -0.5,
            "value_size": value,
        }

    yield sample([5, 1, 9], 4, 12, 4, 20, 16, 3, 0)
    yield sample([5, 0, 17], 3, 10, 6, 24, 14, 8, 3, sinks=True)
    yield sample([33], 1, 47, 2, 5, 40, 1, 1)
    yield sample([2, 3], 2, 30, 8, 64, 10, 9, 2)
    yield sample([], 2, 8, 4, 8, 8, 3, 3)
    yield sample([], 2, 8, 4, 8, 8, 3, 0)


def paged_sparse_sample(
    draw: Draw, sequences: list[tuple[int, int]], *, count: int, padding: int = 0, sinks: bool = False, **more: Any
) -> Sample:
    """A call of latent attention for `sequences`, with keys selected for it."""
    sample = paged_latent_sample(draw, sequences, padding=padding, **more)
    given = {"selected": chosen_keys(draw, sequences, count, padding),
             "sinks": draw.normal(sample["q"].shape[2]) if sinks else None}  # fmt: skip
    first = {name: sample.pop(name) for name in ("q", "cache", "weight")}
    return {**first, **given, **sample}


def paged_sparse_latent_attention(draw: Draw) -> Iterator[Sample]:
    small: dict[str, int] = {"heads": 3, "nope": 12, "rope": 6, "latent": 10, "value": 14}
    large: dict[str, int] = {"heads": 2, "nope": 15, "rope": 4, "latent": 40, "value": 17}
    yield paged_sparse_sample(draw, DECODE, count=5, **large)
    yield paged_sparse_sample(draw, DECODE, count=1, **small, page_size=1, padding=2)
    yield paged_sparse_sample(draw, MIXED, count=6, **large, page_size=3, padding=4)
    yield paged_sparse_sample(draw, MIXED, count=33, **small, page_size=16, sinks=True)
    yield paged_sparse_sample(draw, MIXED, count=8, **large, cache_dtype=torch.float16)
    eight: dict[str, Any] = {"cache_dtype": torch.float8_e4m3fn}
    yield paged_sparse_sample(draw, DECODE, count=4, **large, page_size=3, sinks=True, **eight)
    yield paged_sparse_sample(draw, MIXED, count=7, **small, padding=2, **eight)
    yield paged_sparse_sample(draw, [(3, 200), (1, 131)], count=130, **{**small, "heads": 8}, page_size=8)
    # Nothing to see: an empty context, a query before the first key, and no sequences at all.
    nothing = draw.of([0, 1], torch.int32)
    yield paged_sparse_sample(draw, [(1, 3), (2, 2)], count=2, **large, kv_lens=nothing)
    yield paged_sparse_sample(draw, [], count=2, **large, padding=3)
    yield paged_sparse_sample(draw, [], count=2, **large)


def write_index_keys(draw: Draw) -> Iterator[Sample]:
    def sample(slots: list[int], pages: int, page_size: int, size: int, dtype: torch.dtype) -> Sample:
        return {
            "k": draw.normal(1, len(slots), size),
            "cache": draw.normal(pages, page_size, size, dtype=dtype),
            "slot_mapping": draw.of(slots, torch.int64),
        }

    yield sample([9, 0, 4, 14], 5, 3, 8, draw.dtype)
    yield sample([-1, 7, -1, 0, 2, -1], 2, 4, 5, draw.dtype)
    yield sample([-1, 7, -1, 5, 2, -1], 2, 4, 5, draw.dtype)
    yield sample([-1, -1], 2, 4, 5, draw.dtype)
    yield sample([], 2, 4, 5, draw.dtype)
    yield sample([-1], 0, 4, 5, draw.dtype)
    yield sample([3, -1, 0], 1, 4, 16, torch.bfloat16)
    # Above what a float8 can hold, too.
    steep = sample([3, -1, 0, 7], 3, 4, 11, torch.float8_e4m3fn)
    yield steep | {"k": draw.normal(1, 4, 11, scale=300.0)}
    yield sample([1, -1, 2], 2, 2, 8, draw.dtype) | {"k": draw.normal(1, 3, 12)[..., :8]}


SAMPLES = {
    ("precast.select_keys", 1): select_keys,
    ("precast.paged_select_keys", 1): paged_select_keys,
    ("precast.sparse_latent_attention", 1): sparse_latent_attention,
    ("precast.paged_sparse_latent_attention", 1): paged_sparse_latent_attention,
    ("precast.write_index_keys", 1): write_index_keys,
}
