"""Samples of attention to selected blocks: of the selection of blocks, and of attention to those."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from op_samples.attention import paged_sample
from op_samples.draw import Draw, Sample
from op_samples.sparse_attention import DECODE, MIXED, whole_numbers

SHORT = [(5, 5), (0, 6), (1, 9), (2, 20), (11, 29)]
"""A mixed step for samples that take long in Triton's interpreter."""


def select_blocks(draw: Draw) -> Iterator[Sample]:
    def sample(lengths: list[int], heads: int, size: int, count: int, block_size: int, local: int = 1,
               padding: int = 0, *, whole: bool = False) -> Sample:  # fmt: skip
        bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        tokens = bounds[-1] + padding
        make = whole_numbers if whole else Draw.normal
        return {
            "q": make(draw, 1, tokens, heads, size),
            "k": make(draw, 1, tokens, size),
            "cu_seqlens": draw.of(bounds, torch.int32),
            "count": count,
            "block_size": block_size,
            "local": local,
        }

    yield sample([5, 1, 9], 4, 16, 2, 3)
    yield sample([5, 0, 17], 3, 10, 4, 1, 2, 3)
    yield sample([33], 1, 24, 1, 8, 0, 1)
    yield sample([2, 3], 2, 8, 100, 4, 1, 2)
    yield sample([40, 6], 2, 5, 3, 4, 1, whole=True)
    yield sample([], 2, 8, 4, 4, 1, 3)
    yield sample([], 2, 8, 4, 4)
    # Queries and keys as slices of one product.
    fused = draw.normal(1, 7, 40)
    yield sample([3, 4], 3, 8, 2, 2) | {"q": fused[..., :24].view(1, 7, 3, 8), "k": fused[..., 24:32]}


def paged_blocks_sample(
    draw: Draw,
    sequences: list[tuple[int, int]],
    *,
    heads: int,
    size: int,
    count: int,
    block_size: int,
    local: int = 1,
    whole: bool = False,
    **more: Any,
) -> Sample:
    """A call for `sequences`, with the pages, the NaN and the missing page of `paged_sample`."""
    paged = paged_sample(draw, sequences, heads=heads, kv_heads=1, size=size, **more)
    cache, q = paged["k_cache"][:, :, 0], paged["q"]
    for name in ("q", "k_cache", "v_cache", "sinks", "scale", "window"):
        paged.pop(name, None)
    if whole:
        cache = torch.where(cache.isnan(), cache.float(), whole_numbers(draw, *cache.shape).float()).to(cache.dtype)
        q = torch.where(q.isnan(), q, whole_numbers(draw, *q.shape))
    return {"q": q, "cache": cache, **paged, "count": count, "block_size": block_size, "local": local}


def paged_select_blocks(draw: Draw) -> Iterator[Sample]:
    yield paged_blocks_sample(draw, DECODE, heads=4, size=16, count=2, block_size=4)
    yield paged_blocks_sample(draw, DECODE, heads=3, size=10, count=1, block_size=3, page_size=1, padding=2)
    yield paged_blocks_sample(draw, MIXED, heads=2, size=40, count=3, block_size=4, page_size=3, padding=4)
    yield paged_blocks_sample(draw, SHORT, heads=2, size=8, count=33, block_size=2, page_size=16)
    yield paged_blocks_sample(draw, SHORT, heads=5, size=12, count=4, block_size=1, local=2, cache_dtype=torch.float16)
    yield paged_blocks_sample(draw, MIXED, heads=1, size=12, count=2, block_size=5, local=0)
    # Page lists that begin within a block.
    yield paged_blocks_sample(draw, SHORT, heads=2, size=8, count=2, block_size=7, page_size=2, window=9, cut=True)
    for sequences in (DECODE, MIXED):
        yield paged_blocks_sample(draw, sequences, heads=2, size=5, count=3, block_size=4, whole=True, padding=1)
    yield paged_blocks_sample(
        draw, [(3, 200), (1, 131)], heads=1, size=3, count=5, block_size=16, whole=True, page_size=8
    )
    eight: dict[str, Any] = {"cache_dtype": torch.float8_e4m3fn}
    yield paged_blocks_sample(draw, DECODE, heads=4, size=16, count=3, block_size=4, page_size=3, **eight)
    yield paged_blocks_sample(draw, SHORT, heads=4, size=16, count=3, block_size=4, padding=2, whole=True, **eight)
    # Nothing to see: an empty context, a query before the first key, and no sequences at all.
    nothing = draw.of([0, 1], torch.int32)
    yield paged_blocks_sample(draw, [(1, 3), (2, 2)], heads=2, size=8, count=2, block_size=4, kv_lens=nothing)
    yield paged_blocks_sample(draw, [], heads=2, size=8, count=2, block_size=4, padding=3)
    yield paged_blocks_sample(draw, [], heads=2, size=8, count=2, block_size=4)


def chosen_blocks(
    draw: Draw, sequences: list[tuple[int, int]], groups: int, count: int, block_size: int, padding: int
) -> torch.Tensor:
    """Numbers of up to `count` blocks that each query sees for each group of heads, ascending, then -1; some are left
    out, and padding's are of blocks too."""
    rows = []
    for queries, kv_len in sequences:
        for position in range(kv_len - queries, kv_len):
            for group in range(groups):
                held = max(position // block_size + 1, 0)
                kept = draw.permutation(held)[: max(count - (position + group) % 3, 1)].tolist()
                rows.append(sorted(kept) + [-1] * (count - len(kept)))
    rows += [list(range(count))] * (padding * groups)
    return draw.of(rows, torch.int32).view(1, len(rows) // groups, groups, count)


def block_sparse_attention(draw: Draw) -> Iterator[Sample]:
    def sample(lengths: list[int], heads: int, kv_heads: int, groups: int, size: int, value: int, count: int,
               block_size: int, padding: int = 0, *, tail: bool = False) -> Sample:  # fmt: skip
        bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        tokens = bounds[-1] + padding
        sequences = [(length, length) for length in lengths]
        return {
            "q": draw.normal(1, tokens, heads, size),
            "k": draw.normal(1, tokens, kv_heads, size),
            "v": draw.normal(1, tokens, kv_heads, value),
            "selected": chosen_blocks(draw, sequences, groups, count, block_size, padding),
            "cu_seqlens": draw.of(bounds, torch.int32),
            "scale": size**-0.5,
            "block_size": block_size,
            "tail": tail,
        }

    yield sample([5, 1, 9], 4, 2, 2, 16, 16, 2, 3)
    yield sample([5, 1, 9], 4, 2, 1, 16, 16, 2, 3, 1, tail=True)
    yield sample([5, 0, 17], 6, 3, 1, 10, 14, 4, 1, 3)
    yield sample([33], 4, 1, 4, 24, 7, 1, 8, 1)
    yield sample([2, 3], 2, 2, 2, 8, 8, 9, 4, 2)
    yield sample([], 2, 1, 1, 8, 8, 3, 4, 3)
    yield sample([], 2, 1, 1, 8, 8, 3, 4)


def paged_block_sparse_sample(
    draw: Draw, sequences: list[tuple[int, int]], *, groups: int, count: int, block_size: int, padding: int = 0,
    tail: bool = False, **more: Any,
) -> Sample:  # fmt: skip
    """A call of attention for `sequences`, with blocks selected for it."""
    sample = paged_sample(draw, sequences, padding=padding, **more)
    selected = chosen_blocks(draw, sequences, groups, count, block_size, padding)
    first = {name: sample.pop(name) for name in ("q", "k_cache", "v_cache")}
    for name in ("sinks", "window"):
        sample.pop(name, None)
    return {**first, "selected": selected, **sample, "block_size": block_size, "tail": tail}


def paged_block_sparse_attention(draw: Draw) -> Iterator[Sample]:
    small: dict[str, int] = {"heads": 4, "kv_heads": 2, "groups": 2, "size": 12, "value": 14}
    large: dict[str, int] = {"heads": 6, "kv_heads": 1, "groups": 1, "size": 40}
    yield paged_block_sparse_sample(draw, DECODE, count=2, block_size=4, **large)
    yield paged_block_sparse_sample(draw, DECODE, count=1, block_size=3, **small, page_size=1, padding=2)
    yield paged_block_sparse_sample(draw, MIXED, count=3, block_size=4, **large, page_size=3, padding=4)
    yield paged_block_sparse_sample(draw, SHORT, count=33, block_size=2, **small, page_size=16)
    yield paged_block_sparse_sample(draw, MIXED, count=4, block_size=8, **large, cache_dtype=torch.float16)
    # More selections than key heads, and fewer.
    yield paged_block_sparse_sample(draw, MIXED, count=2, block_size=4, **{**small, "groups": 4})
    yield paged_block_sparse_sample(draw, SHORT, count=2, block_size=4, **{**small, "groups": 1})
    # With tails, of blocks of which a tile has several, and of others.
    one: dict[str, int] = {**small, "groups": 1}
    yield paged_block_sparse_sample(draw, DECODE, count=2, block_size=4, **one, tail=True)
    yield paged_block_sparse_sample(draw, SHORT, count=3, block_size=2, **one, padding=2, tail=True)
    yield paged_block_sparse_sample(draw, MIXED, count=3, block_size=5, **one, tail=True)
    # Page lists that begin within a block.
    yield paged_block_sparse_sample(
        draw, SHORT, count=4, block_size=4, **small, page_size=2, window=9, cut=True, tail=True
    )
    yield paged_block_sparse_sample(draw, SHORT, count=4, block_size=7, **small, page_size=2, window=9, cut=True)
    eight: dict[str, Any] = {"cache_dtype": torch.float8_e4m3fn}
    yield paged_block_sparse_sample(draw, DECODE, count=2, block_size=4, **large, page_size=3, **eight)
    scales = {"k_scale": draw.of([0.7], torch.float32), "v_scale": draw.of([1.7], torch.float32)}
    yield paged_block_sparse_sample(draw, SHORT, count=3, block_size=5, **small, padding=2, **eight, **scales)
    yield paged_block_sparse_sample(
        draw, [(3, 200), (1, 131)], count=5, block_size=16, **{**small, "heads": 8}, page_size=8
    )
    # Nothing to see: an empty context, a query before the first key, and no sequences at all.
    nothing = draw.of([0, 1], torch.int32)
    yield paged_block_sparse_sample(draw, [(1, 3), (2, 2)], count=2, block_size=2, **large, kv_lens=nothing)
    yield paged_block_sparse_sample(draw, [], count=2, block_size=2, **large, padding=3)
    yield paged_block_sparse_sample(draw, [], count=2, block_size=2, **large)


SAMPLES = {
    ("precast.select_blocks", 1): select_blocks,
    ("precast.paged_select_blocks", 1): paged_select_blocks,
    ("precast.block_sparse_attention", 1): block_sparse_attention,
    ("precast.paged_block_sparse_attention", 1): paged_block_sparse_attention,
}
