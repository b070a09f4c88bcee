"""Samples of attention, over packed tokens and over pages, and of writes into pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from op_samples.draw import Draw, Sample
from precast.kernels.attention.attend import first_seen


def attention(draw: Draw) -> Iterator[Sample]:
    def sample(
        lengths: list[int], heads: int, kv_heads: int, size: int, value: int, padding: int, **more: Any
    ) -> Sample:
        bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        tokens = bounds[-1] + padding
        return {
            "q": draw.normal(1, tokens, heads, size),
            "k": draw.normal(1, tokens, kv_heads, size),
            "v": draw.normal(1, tokens, kv_heads, value),
            "sinks": None,
            "cu_seqlens": draw.of(bounds, torch.int32),
            "scale": size**-0.5,
            **more,
        }

    yield sample([5, 1, 9], 4, 2, 16, 16, 0)
    yield sample([5, 0, 17], 6, 2, 24, 8, 3, window=4)
    yield sample([33], 3, 1, 40, 40, 1, window=1, soft_cap=5.0)
    yield sample([2, 3], 2, 2, 8, 8, 2, sinks=draw.normal(2), soft_cap=2.0, window=100)
    yield sample([1, 1, 1], 7, 1, 32, 32, 0, sinks=draw.normal(7, dtype=torch.float32))
    yield sample([6, 0, 11, 1], 6, 3, 24, 8, 2, slopes=draw.uniform(6, dtype=torch.float32))
    yield sample([9, 4], 3, 1, 40, 40, 0, slopes=draw.uniform(3, dtype=torch.float32), window=3, soft_cap=4.0)
    yield sample([7, 12, 5], 4, 2, 16, 8, 1, chunk=5)
    yield sample([6, 3], 2, 2, 8, 8, 0, chunk=1, soft_cap=3.0)
    more = {"sinks": draw.normal(7), "slopes": draw.uniform(7, dtype=torch.float32)}
    yield sample([23, 2], 7, 1, 32, 32, 3, chunk=7, **more)
    yield sample([6, 0, 11, 1], 6, 3, 24, 8, 2, bias=draw.normal(1, 20, 6, 5))
    yield sample([9, 4], 4, 1, 8, 8, 0, bias=draw.normal(1, 13, 4, 30), window=6, sinks=draw.normal(4), soft_cap=4.0)
    yield sample([], 2, 1, 8, 8, 3)
    yield sample([], 2, 1, 8, 8, 0)
    # Query, key and value as slices of the fused product.
    fused = draw.normal(1, 7, 4, 16)
    yield sample([3, 4], 2, 1, 16, 16, 0, q=fused[:, :, :2], k=fused[:, :, 2:3], v=fused[:, :, 3:])


def paged_sample(
    draw: Draw,
    sequences: list[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    size: int,
    value: int | None = None,
    page_size: int = 4,
    padding: int = 0,
    cut: bool = False,
    cache_dtype: torch.dtype | None = None,
    **more: Any,
) -> Sample:
    """A call for `sequences`, each (tokens of this step, context length with them), on pages in random order.

    Slots that hold no key are NaN, and so are padding's queries; behind the last page list stands a page that isn't
    there: whoever reads one of them is found out. `cut`: page lists begin with the first page that the window or chunk
    of the first query reaches. Other arguments are taken as they are.
    """
    window, chunk = more.get("window"), more.get("chunk")
    starts, counts = [], []
    for queries, kv_len in sequences:
        first = first_seen(kv_len - queries, window, chunk) if cut else 0
        starts.append(first // page_size * page_size)
        counts.append(-(-(kv_len - starts[-1]) // page_size))
    pages = sum(counts) + 2
    table = draw.permutation(pages, torch.int32)[: sum(counts)]
    k = draw.normal(pages, page_size, kv_heads, size, dtype=cache_dtype)
    v = draw.normal(pages, page_size, kv_heads, value or size, dtype=cache_dtype)
    written = _written_slots(table, sequences, starts, counts, page_size, pages)
    bounds = [sum(queries for queries, _ in sequences[:i]) for i in range(len(sequences) + 1)]
    q = draw.normal(1, bounds[-1] + padding, heads, size)
    q[:, bounds[-1] :] = float("nan")
    return {
        "q": q,
        "k_cache": torch.where(written[..., None, None], k.float(), float("nan")).to(k.dtype),
        "v_cache": torch.where(written[..., None, None], v.float(), float("nan")).to(v.dtype),
        "sinks": None,
        "cu_seqlens": draw.of(bounds, torch.int32),
        "kv_lens": draw.of([kv_len for _, kv_len in sequences], torch.int32),
        "page_indices": torch.cat((table, draw.of([2**30], torch.int32))),
        "page_indptr": draw.of([sum(counts[:i]) for i in range(len(counts) + 1)], torch.int32),
        "page_start": draw.of(starts, torch.int32),
        "scale": size**-0.5,
        **more,
    }


def _written_slots(
    table: torch.Tensor,
    sequences: list[tuple[int, int]],
    starts: list[int],
    counts: list[int],
    page_size: int,
    pages: int,
) -> torch.Tensor:
    written = torch.zeros(pages, page_size, dtype=torch.bool, device=table.device)
    first = 0
    for (_, kv_len), start, count in zip(sequences, starts, counts, strict=True):
        held = torch.arange(count * page_size, device=table.device) < kv_len - start
        written[table[first : first + count].long()] = held.view(count, page_size)
        first += count
    return written


def paged_attention(draw: Draw) -> Iterator[Sample]:
    decode, mixed = [(1, 7), (1, 1), (1, 30), (1, 12)], [(5, 5), (1, 9), (3, 20), (0, 6), (7, 7)]
    yield paged_sample(draw, decode, heads=4, kv_heads=2, size=16)
    yield paged_sample(draw, mixed, heads=6, kv_heads=2, size=24, value=8, page_size=3, padding=4)
    yield paged_sample(draw, mixed, heads=7, kv_heads=1, size=40, page_size=1, window=4, cut=True)
    yield paged_sample(draw, mixed, heads=2, kv_heads=2, size=8, page_size=16, window=5, soft_cap=3.0, padding=1)
    yield paged_sample(draw, decode, heads=4, kv_heads=1, size=16, window=6, cut=True, sinks=draw.normal(4))
    yield paged_sample(
        draw, decode, heads=3, kv_heads=3, size=8, window=1, soft_cap=2.0, sinks=draw.normal(3), padding=2
    )
    yield paged_sample(draw, mixed, heads=2, kv_heads=1, size=8, window=1000)
    yield paged_sample(draw, decode, heads=4, kv_heads=2, size=16, cache_dtype=torch.float16)
    eight: dict[str, Any] = {"cache_dtype": torch.float8_e4m3fn, "cut": True}
    yield paged_sample(draw, decode, heads=6, kv_heads=2, size=24, value=8, page_size=3, **eight)
    yield paged_sample(draw, mixed, heads=4, kv_heads=2, size=16, padding=2, **eight)
    yield paged_sample(draw, mixed, heads=7, kv_heads=1, size=40, page_size=8, window=4, soft_cap=3.0, **eight)
    slopes = draw.uniform(6, dtype=torch.float32)
    eight |= scales(draw)
    yield paged_sample(draw, decode, heads=6, kv_heads=2, size=24, value=8, page_size=3, sinks=draw.normal(6), **eight)
    yield paged_sample(draw, mixed, heads=6, kv_heads=1, size=16, page_size=8, padding=2, slopes=slopes, **eight)
    yield paged_sample(draw, mixed, heads=7, kv_heads=1, size=40, window=4, soft_cap=3.0, **eight)
    yield paged_sample(draw, decode, heads=6, kv_heads=2, size=16, slopes=slopes)
    yield paged_sample(draw, mixed, heads=6, kv_heads=3, size=24, page_size=3, window=5, cut=True, slopes=slopes)
    yield paged_sample(draw, mixed, heads=2, kv_heads=1, size=8, value=16, chunk=5, soft_cap=3.0, padding=3)
    yield paged_sample(draw, decode, heads=7, kv_heads=1, size=40, page_size=8, chunk=6, cut=True)
    yield paged_sample(draw, mixed, heads=3, kv_heads=3, size=8, page_size=2, chunk=1, cut=True)
    more: dict[str, Any] = {"slopes": slopes, "sinks": draw.normal(6), "soft_cap": 2.0}
    yield paged_sample(draw, mixed, heads=6, kv_heads=1, size=16, page_size=3, chunk=7, cut=True, **more)
    yield paged_sample(draw, decode, heads=6, kv_heads=2, size=16, bias=draw.normal(1, 4, 6, 9))
    more = {"bias": draw.normal(1, 18, 6, 4), "slopes": slopes, "sinks": draw.normal(6), "cut": True}
    yield paged_sample(draw, mixed, heads=6, kv_heads=3, size=24, page_size=3, window=7, padding=2, **more)
    # Nothing to see: an empty context, a query before the first key, and no sequences at all.
    yield paged_sample(draw, [(1, 3), (2, 2)], heads=2, kv_heads=1, size=8, kv_lens=draw.of([0, 1], torch.int32))
    yield paged_sample(draw, [], heads=2, kv_heads=1, size=8, padding=3)


def new_slots(sample: Sample, *, page_size: int) -> torch.Tensor:
    """Of a cache, the slots that hold this step's tokens."""
    slots = []
    bounds, indptr, pages = (sample[name].tolist() for name in ("cu_seqlens", "page_indptr", "page_indices"))
    for b, (kv_len, start) in enumerate(zip(sample["kv_lens"].tolist(), sample["page_start"].tolist(), strict=True)):
        for key in range(max(0, kv_len - start - (bounds[b + 1] - bounds[b])), kv_len - start):
            slots.append(pages[indptr[b] + key // page_size] * page_size + key % page_size)
    return torch.tensor(slots, dtype=torch.long)


def scales(draw: Draw) -> Sample:
    """What keys and values are divided by: no powers of two, by which nothing would be rounded."""
    return {"k_scale": draw.of([0.3], torch.float32), "v_scale": draw.of([1.7], torch.float32)}


def write_kv(draw: Draw) -> Iterator[Sample]:
    def sample(slots: list[int], pages: int, page_size: int, size: int, value: int, dtype: torch.dtype) -> Sample:
        return {
            "k": draw.normal(1, len(slots), 2, size),
            "v": draw.normal(1, len(slots), 2, value),
            "k_cache": draw.normal(pages, page_size, 2, size, dtype=dtype),
            "v_cache": draw.normal(pages, page_size, 2, value, dtype=dtype),
            "slot_mapping": draw.of(slots, torch.int64),
        }

    yield sample([9, 0, 4, 14], 5, 3, 8, 8, draw.dtype)
    yield sample([-1, 7, -1, 0, 2, -1], 2, 4, 5, 3, draw.dtype)
    yield sample([-1, 7, -1, 5, 2, -1], 2, 4, 5, 3, draw.dtype)
    yield sample([-1, -1], 2, 4, 5, 3, draw.dtype)
    yield sample([], 2, 4, 5, 3, draw.dtype)
    yield sample([-1], 0, 4, 5, 3, draw.dtype)
    yield sample([3, -1, 0], 1, 4, 16, 16, torch.bfloat16)
    yield sample([3, -1, 0], 1, 4, 16, 16, torch.float8_e4m3fn)
    # All a float8 can hold and more: below its least, between two of its values, above its largest, infinite.
    steep = sample([0, -1, 6, 3, 5], 3, 3, 24, 9, torch.float8_e4m3fn)
    spread = draw.uniform(1, 5, 2, 24, low=-14.0, high=13.0, dtype=torch.float32).exp2()
    signed = draw.to(spread * draw.normal(1, 5, 2, 24, dtype=torch.float32).sign(), draw.dtype)
    signed[0, 0, 0, :2] = draw.of([float("inf"), float("-inf")], draw.dtype)
    yield steep | {"k": signed, "v": signed[..., 5:14]}
    yield steep | {"k": signed, "v": signed[..., 5:14]} | scales(draw)
    # Keys and values as slices of the fused product.
    fused = draw.normal(1, 3, 6, 8)
    yield sample([1, -1, 2], 2, 2, 8, 8, draw.dtype) | {"k": fused[:, :, 2:4], "v": fused[:, :, 4:]}


def rotary_write_kv(draw: Draw) -> Iterator[Sample]:
    def sample(
        slots: list[int], heads: int, kv_heads: int, size: int, value: int, pairs: int,
        dtype: torch.dtype | None = None, **more: Any,
    ) -> Sample:  # fmt: skip
        tokens = len(slots)
        angle = draw.uniform(1, tokens, pairs, high=6.3, dtype=torch.float32)
        return {
            "q": draw.normal(1, tokens, heads, size),
            "k": draw.normal(1, tokens, kv_heads, size),
            "v": draw.normal(1, tokens, kv_heads, value),
            "cos": angle.cos().to(draw.dtype),
            "sin": angle.sin().to(draw.dtype),
            "q_weight": None,
            "k_weight": None,
            "k_cache": draw.normal(3, 4, kv_heads, size, dtype=dtype),
            "v_cache": draw.normal(3, 4, kv_heads, value, dtype=dtype),
            "slot_mapping": draw.of(slots, torch.int64),
            "interleaved": False,
            **more,
        }

    def weights(size: int) -> Sample:
        return {"q_weight": draw.uniform(size, low=0.5), "k_weight": draw.uniform(size, low=0.5), "eps": 1e-6}

    for interleaved in (False, True):
        yield sample([9, 0, 4, 11], 4, 2, 16, 16, 8, interleaved=interleaved)
        yield sample([-1, 7, -1, 0, 2, -1], 7, 1, 40, 24, 5, interleaved=interleaved, **weights(40), offset=1.0)
    yield sample([5, -1, 3], 3, 3, 72, 72, 36, **weights(72), cast_before_scale=True)
    yield sample([5, 6], 2, 1, 7, 3, 0, eps=1e-5)
    yield sample([8], 6, 2, 12, 5, 3, **weights(12) | {"q_weight": None})
    yield sample([-1, -1], 2, 2, 8, 8, 4)
    yield sample([], 2, 1, 8, 8, 4, **weights(8))
    empty = sample([-1], 2, 1, 8, 8, 4)
    yield empty | {"k_cache": empty["k_cache"][:0], "v_cache": empty["v_cache"][:0]}
    yield sample([1, 2], 4, 2, 16, 16, 8, torch.bfloat16)
    # By quarters of a turn nothing is rounded but what is stored: no more of it can be asked of 8 bits.
    quarters = sample([3, -1, 0, 7], 4, 2, 16, 8, 8, torch.float8_e4m3fn)
    cos, sin = ([[[1.0, 0.0, -1.0, 0.0] * 2] * 4], [[[0.0, 1.0, 0.0, -1.0] * 2] * 4])
    yield quarters | {"cos": draw.of(cos, draw.dtype), "sin": draw.of(sin, draw.dtype)}
    yield quarters | {"cos": draw.of(cos, draw.dtype), "sin": draw.of(sin, draw.dtype)} | scales(draw)
    # Slices of the fused product, and tables in float32.
    fused, made = draw.normal(1, 3, 7 * 8).view(1, 3, 7, 8), sample([1, -1, 2], 4, 1, 8, 8, 4, **weights(8))
    parts = {"q": fused[:, :, :4], "k": fused[:, :, 4:5], "v": fused[:, :, 6:]}
    yield made | parts | {"cos": made["cos"].float(), "sin": made["sin"].float()}


SAMPLES = {
    ("precast.attention", 1): attention,
    ("precast.paged_attention", 1): paged_attention,
    ("precast.write_kv", 1): write_kv,
    ("precast.rotary_write_kv", 1): rotary_write_kv,
}
