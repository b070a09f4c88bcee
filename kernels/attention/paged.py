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

from precast.kernels.attention.attend import Pages, Scoring, attend, check_window, first_seen
from precast.kernels.calls import implements
from precast.kernels.dtypes import FLOAT
from precast.kernels.spec import PRODUCT, Draw, OpSpec, Sample
from precast.kernels.storage import STORED, gathered


@implements("paged_attention")
def paged_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, pages: Pages, scoring: Scoring
) -> torch.Tensor:
    """`q` [1, T, H, D], `k_cache` [P, S, K, D], `v_cache` [P, S, K, Dv], `sinks` [H]; [1, T, H, Dv] in q's dtype.

    `slopes` [H] float32. A cache of another dtype, float8_e4m3fn too, is converted as it is read. Computed in float32,
    rounded once. Raises ValueError for a window or chunk below 1, and for both at once.
    """
    check_window(scoring.window, scoring.chunk)
    out = q.new_zeros((*q.shape[:-1], v_cache.shape[-1]))
    for rows, queries, keys, held in each_sequence(pages, q.device):
        # What lies past the last key was never written, or by another sequence: it must not enter any product.
        k, v = (gathered(cache, held).flatten(0, 1)[: len(keys)] for cache in (k_cache, v_cache))
        out[0, rows] = attend(q[0, rows], k, v, queries, keys[: len(k)], scoring)
    return out


def each_sequence(
    pages: Pages, device: torch.device
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Each sequence's tokens, their positions, those of its keys, and the pages that hold these."""
    bounds, indptr = pages.cu_seqlens.tolist(), pages.page_indptr.tolist()
    for b, (kv_len, start) in enumerate(zip(pages.kv_lens.tolist(), pages.page_start.tolist(), strict=True)):
        queries = torch.arange(kv_len - (bounds[b + 1] - bounds[b]), kv_len, device=device)
        keys = torch.arange(start, max(kv_len, start), device=device)
        yield slice(bounds[b], bounds[b + 1]), queries, keys, pages.page_indices[indptr[b] : indptr[b + 1]]


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


PAGES_AXES = {"cu_seqlens": "B+1", "kv_lens": "B", "page_indices": "N", "page_indptr": "B+1", "page_start": "B"}

PAGED_ATTENTION = OpSpec(
    name="precast.paged_attention",
    axes={
        "q": "1 T H D",
        "k_cache": "P S K D",
        "v_cache": "P S K E",
        "sinks": "H",
        "slopes": "H",
        **PAGES_AXES,
    },
    results={"y": "1 T H E"},
    dtypes={"q": FLOAT, "k_cache": STORED, "v_cache": STORED, "sinks": FLOAT, "slopes": (torch.float32,)}
    | dict.fromkeys(PAGES_AXES, (torch.int32,)),
    reference=paged_attention,
    samples=_samples,
    tolerances=PRODUCT,
)
