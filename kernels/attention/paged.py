"""paged_attention@1: causal attention of this step's queries over keys and values in the pages of a cache, formula in
`precast.kernels.attention.attend`.

Sequence b's queries are tokens `cu_seqlens[b] .. cu_seqlens[b + 1]`, the last of them at absolute position
`kv_lens[b] - 1`. Its keys lie in the pages `page_indices[page_indptr[b] .. page_indptr[b + 1]]`; the first slot of the
first page has absolute position `page_start[b]` (the list is cut to the window or chunk on the host), and slots from
position `kv_lens[b]` on hold nothing. Positions and lengths are absolute, page lists local: `page_start` is the only
bridge. Tokens past `cu_seqlens[B]` are padding, and give zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from precast.kernels.attention import batched, cuda
from precast.kernels.attention.attend import attend, check_window, distance_bias, first_seen, visible_keys
from precast.kernels.dtypes import FLOAT
from precast.kernels.spec import PRODUCT, Draw, OpSpec, Sample
from precast.kernels.storage import STORED, gathered


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    sinks: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    kv_lens: torch.Tensor,
    page_indices: torch.Tensor,
    page_indptr: torch.Tensor,
    page_start: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    slopes: torch.Tensor | None = None,
    chunk: int | None = None,
) -> torch.Tensor:
    """`q` [1, T, H, D], `k_cache` [P, S, K, D], `v_cache` [P, S, K, Dv], `sinks` [H]; [1, T, H, Dv] in q's dtype.

    All metadata is int32: `cu_seqlens`, `page_indptr` [B + 1]; `kv_lens`, `page_start` [B]; `page_indices` [N].
    `slopes` [H] float32. A cache of another dtype, float8_e4m3fn too, is
    converted as it is read. Computed in float32, rounded once. Raises
    ValueError for a window or chunk below 1, and for both at once.
    """
    check_window(window, chunk)
    out = q.new_zeros((*q.shape[:-1], v_cache.shape[-1]))
    bounds, indptr = cu_seqlens.tolist(), page_indptr.tolist()
    for b, (kv_len, start) in enumerate(zip(kv_lens.tolist(), page_start.tolist(), strict=True)):
        rows = slice(bounds[b], bounds[b + 1])
        pages = page_indices[indptr[b] : indptr[b + 1]]
        # What lies past the last key was never written, or by another sequence: it must not enter any product.
        k = gathered(k_cache, pages).flatten(0, 1)[: max(kv_len - start, 0)]
        v = gathered(v_cache, pages).flatten(0, 1)[: max(kv_len - start, 0)]
        queries = torch.arange(kv_len - (bounds[b + 1] - bounds[b]), kv_len, device=q.device)
        keys = torch.arange(start, start + len(k), device=q.device)
        visible = visible_keys(queries, keys, window, chunk)
        bias = distance_bias(slopes, queries, keys)
        out[0, rows] = attend(q[0, rows], k, v, visible, sinks, scale, soft_cap, bias)
    return out


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


def _samples(draw: Draw) -> Iterator[Sample]:
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
    yield paged_sample(draw, decode, heads=6, kv_heads=2, size=16, slopes=slopes)
    yield paged_sample(draw, mixed, heads=6, kv_heads=3, size=24, page_size=3, window=5, cut=True, slopes=slopes)
    yield paged_sample(draw, mixed, heads=2, kv_heads=1, size=8, value=16, chunk=5, soft_cap=3.0, padding=3)
    yield paged_sample(draw, decode, heads=7, kv_heads=1, size=40, page_size=8, chunk=6, cut=True)
    yield paged_sample(draw, mixed, heads=3, kv_heads=3, size=8, page_size=2, chunk=1, cut=True)
    more: dict[str, Any] = {"slopes": slopes, "sinks": draw.normal(6), "soft_cap": 2.0}
    yield paged_sample(draw, mixed, heads=6, kv_heads=1, size=16, page_size=3, chunk=7, cut=True, **more)
    # Nothing to see: an empty context, a query before the first key, and no sequences at all.
    yield paged_sample(draw, [(1, 3), (2, 2)], heads=2, kv_heads=1, size=8, kv_lens=draw.of([0, 1], torch.int32))
    yield paged_sample(draw, [], heads=2, kv_heads=1, size=8, padding=3)


_METADATA = ("cu_seqlens", "kv_lens", "page_indices", "page_indptr", "page_start")

PAGED_ATTENTION = OpSpec(
    name="precast.paged_attention",
    axes={
        "q": "1 T H D",
        "k_cache": "P S K D",
        "v_cache": "P S K E",
        "sinks": "H",
        "cu_seqlens": "B+1",
        "kv_lens": "B",
        "page_indices": "N",
        "page_indptr": "B+1",
        "page_start": "B",
        "slopes": "H",
    },
    results={"y": "1 T H E"},
    dtypes={"q": FLOAT, "k_cache": STORED, "v_cache": STORED, "sinks": FLOAT, "slopes": (torch.float32,)}
    | dict.fromkeys(_METADATA, (torch.int32,)),
    reference=paged_attention,
    samples=_samples,
    tolerances=PRODUCT,
    implementations={"cpu": lambda: batched.paged_attention, "cuda": cuda.paged_attention},
)
