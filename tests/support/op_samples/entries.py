"""Samples of attention over entries: of the attention, of their selection, and of their writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from op_samples.attention import paged_sample
from op_samples.draw import Draw, Sample
from op_samples.sparse_attention import DECODE, MIXED, whole_numbers


def entry_attention(draw: Draw) -> Iterator[Sample]:
    def sample(lengths: list[int], heads: int, size: int, rate: int, padding: int, **more: Any) -> Sample:
        bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        tokens, count = bounds[-1] + padding, more.pop("count", None)
        selected = None if count is None else _chosen(draw, [(each, each) for each in lengths], count, rate, padding)
        return {
            "q": draw.normal(1, tokens, heads, size),
            "entries": _between(draw.normal(1, tokens, size), lengths, rate),
            "selected": selected,
            "cu_seqlens": draw.of(bounds, torch.int32),
            "scale": size**-0.5,
            "rate": rate,
            **more,
        }

    yield sample([5, 1, 9], 4, 16, 1, 0)
    yield sample([5, 0, 17], 3, 10, 1, 3, window=4)
    yield sample([33, 7], 2, 24, 1, 1, window=1)
    yield sample([19, 6, 3], 2, 8, 4, 2)
    yield sample([8, 24], 5, 6, 3, 0, count=2)
    yield sample([31, 2], 1, 12, 2, 1, count=40)
    yield sample([3, 2], 2, 8, 7, 0)
    yield sample([], 2, 8, 4, 3)
    yield sample([], 2, 8, 4, 0)
    # Queries and entries as slices of one product.
    fused = draw.normal(1, 7, 40)
    yield sample([3, 4], 3, 8, 1, 0) | {"q": fused[..., :24].view(1, 7, 3, 8), "entries": fused[..., 24:32]}


def _between(entries: torch.Tensor, lengths: list[int], rate: int) -> torch.Tensor:
    """NaN where no block ends."""
    first = 0
    for length in lengths:
        own = entries[0, first : first + length]
        own[torch.arange(length, device=own.device) % rate != rate - 1] = float("nan")
        first += length
    entries[0, first:] = float("nan")
    return entries


def _chosen(draw: Draw, sequences: list[tuple[int, int]], count: int, rate: int, padding: int) -> torch.Tensor:
    """Numbers of entries for each query, those that it may see and others."""
    return draw.integers(-1, 2 + max((end for _, end in sequences), default=0) // rate, 1,
                         sum(queries for queries, _ in sequences) + padding, count, dtype=torch.int32)  # fmt: skip


def paged_entry_sample(
    draw: Draw, sequences: list[tuple[int, int]], *, rate: int, blocks: int = 2, count: int | None = None,
    padding: int = 0, **more: Any,
) -> Sample:  # fmt: skip
    """A call for `sequences`, with pages, NaN and the missing page as in `paged_sample`; so many blocks a page."""
    paged = paged_sample(draw, sequences, kv_heads=1, page_size=blocks * rate, padding=padding, **more)
    cache, q = paged["k_cache"][:, rate - 1 :: rate, 0], paged["q"]
    for name in ("q", "k_cache", "v_cache", "sinks"):
        del paged[name]
    selected = None if count is None else _chosen(draw, sequences, count, rate, padding)
    return {"q": q, "cache": cache.contiguous(), "selected": selected, **paged, "rate": rate}


def paged_entry_attention(draw: Draw) -> Iterator[Sample]:
    yield paged_entry_sample(draw, DECODE, rate=1, heads=4, size=16, window=5, cut=True)
    yield paged_entry_sample(draw, MIXED, rate=1, heads=3, size=10, padding=2)
    yield paged_entry_sample(draw, DECODE, rate=4, heads=4, size=16, blocks=1, padding=3)
    yield paged_entry_sample(draw, MIXED, rate=3, heads=7, size=20, blocks=3, count=4)
    yield paged_entry_sample(draw, MIXED, rate=2, heads=2, size=8, blocks=8, count=30, cache_dtype=torch.float16)
    eight: dict[str, Any] = {"cache_dtype": torch.float8_e4m3fn}
    yield paged_entry_sample(draw, MIXED, rate=2, heads=4, size=16, padding=2, **eight)
    yield paged_entry_sample(draw, [(3, 200), (1, 131)], rate=8, heads=8, size=12)
    # Nothing to see: an empty context, a query before the first key, and no sequences at all.
    nothing = draw.of([0, 1], torch.int32)
    yield paged_entry_sample(draw, [(1, 3), (2, 2)], rate=1, heads=2, size=8, kv_lens=nothing)
    yield paged_entry_sample(draw, [], rate=2, heads=2, size=8, padding=3)
    yield paged_entry_sample(draw, [], rate=2, heads=2, size=8, count=2)


def select_entries(draw: Draw) -> Iterator[Sample]:
    for sample in entry_attention(draw):
        for name in ("selected", "window"):
            sample.pop(name, None)
        weights = draw.normal(*sample["q"].shape[:3], dtype=torch.float32)
        first = {name: sample.pop(name) for name in ("q", "entries")}
        yield {**first, "weights": weights, **sample, "count": 3}
    whole = {"q": whole_numbers(draw, 1, 25, 2, 5), "entries": whole_numbers(draw, 1, 25, 5)}
    weights = whole_numbers(draw, 1, 25, 2, dtype=torch.float32)
    bounds = draw.of([0, 19, 25], torch.int32)
    yield {**whole, "weights": weights, "cu_seqlens": bounds, "scale": 0.25, "rate": 2, "count": 7}


def paged_select_entries(draw: Draw) -> Iterator[Sample]:
    for sample in paged_entry_attention(draw):
        for name in ("selected", "window"):
            sample.pop(name, None)
        if sample["rate"] == 1:
            continue  # their pages may be cut to a window
        first = {name: sample.pop(name) for name in ("q", "cache")}
        weights = draw.normal(*first["q"].shape[:3], dtype=torch.float32)
        weights = torch.where(first["q"][..., 0].isnan(), float("nan"), weights)
        yield {**first, "weights": weights, **sample, "count": 3}


def write_entries(draw: Draw) -> Iterator[Sample]:
    def sample(slots: list[int], pages: int, blocks: int, rate: int, size: int, dtype: torch.dtype) -> Sample:
        return {
            "entries": draw.normal(1, len(slots), size),
            "cache": draw.normal(pages, blocks, size, dtype=dtype),
            "slot_mapping": draw.of(slots, torch.int64),
            "rate": rate,
        }

    yield sample([9, 0, 4, 14], 5, 3, 1, 8, draw.dtype)
    yield sample([8, 9, 10, 11, 4, 5, 0, 1, 2, 3], 3, 2, 3, 5, draw.dtype)
    yield sample([-1, 7, -1, 0, 3, -1], 2, 2, 4, 5, draw.dtype)
    yield sample([-1, 0, 1, 2], 2, 2, 4, 5, draw.dtype)
    yield sample([-1, -1], 2, 4, 2, 5, draw.dtype)
    yield sample([], 2, 4, 2, 5, draw.dtype)
    yield sample([-1], 0, 4, 2, 5, draw.dtype)
    yield sample([3, -1, 1], 1, 4, 2, 16, torch.bfloat16)
    # Above what a float8 can hold, too.
    steep = sample([3, -1, 0, 7], 3, 4, 2, 11, torch.float8_e4m3fn)
    yield steep | {"entries": draw.normal(1, 4, 11, scale=300.0)}
    yield sample([1, -1, 3], 2, 2, 2, 8, draw.dtype) | {"entries": draw.normal(1, 3, 12)[..., :8]}


SAMPLES = {
    ("precast.entry_attention", 1): entry_attention,
    ("precast.paged_entry_attention", 1): paged_entry_attention,
    ("precast.select_entries", 1): select_entries,
    ("precast.paged_select_entries", 1): paged_select_entries,
    ("precast.write_entries", 1): write_entries,
}
