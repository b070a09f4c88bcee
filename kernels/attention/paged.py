"""paged_attention@1: causal attention of this step's queries over keys and values in the pages of a cache, formula in
`precast.kernels.attention.attend`.

Sequence b's queries are tokens `cu_seqlens[b] .. cu_seqlens[b + 1]`, the last of them at absolute position
`kv_lens[b] - 1`. Its keys lie in the pages `page_indices[page_indptr[b] .. page_indptr[b + 1]]`; the first slot of the
first page has absolute position `page_start[b]` (the list is cut to the window or chunk on the host), and slots from
position `kv_lens[b]` on hold nothing. Positions and lengths are absolute, page lists local: `page_start` is the only
bridge. Tokens past `cu_seqlens[B]` are padding, and give zeros.

With scales, keys are `k_scale * k_cache` and values `v_scale * v_cache`: `write_kv` divided them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from precast.kernels.attention.attend import Pages, Scales, Scoring, attend, check_window
from precast.kernels.calls import implements
from precast.kernels.dtypes import FLOAT
from precast.kernels.spec import PRODUCT, OpSpec
from precast.kernels.storage import STORED, gathered, unscaled


@implements("paged_attention")
def paged_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, pages: Pages, scoring: Scoring, scales: Scales
) -> torch.Tensor:
    """`q` [1, T, H, D], `k_cache` [P, S, K, D], `v_cache` [P, S, K, Dv], `sinks` [H]; [1, T, H, Dv] in q's dtype.

    `slopes` [H] float32, `bias` [1, T, H, R]. A cache of another dtype, float8_e4m3fn too, is converted as it is read;
    `scales` are for float8_e4m3fn alone. Computed in float32, rounded once. Raises ValueError for a window or chunk
    below 1, and for both at once.
    """
    check_window(scoring.window, scoring.chunk)
    out = q.new_zeros((*q.shape[:-1], v_cache.shape[-1]))
    for rows, queries, keys, held in each_sequence(pages, q.device):
        # What lies past the last key was never written, or by another sequence: it must not enter any product.
        k, v = (
            unscaled(gathered(cache, held).flatten(0, 1)[: len(keys)], scale)
            for cache, scale in zip((k_cache, v_cache), scales, strict=True)
        )
        out[0, rows] = attend(q[0, rows], k, v, queries, keys[: len(k)], scoring.of(rows))
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


PAGES_AXES = {"cu_seqlens": "B+1", "kv_lens": "B", "page_indices": "N", "page_indptr": "B+1", "page_start": "B"}

PAGED_ATTENTION = OpSpec(
    name="precast.paged_attention",
    axes={
        "q": "1 T H D", "k_cache": "P S K D", "v_cache": "P S K E", "sinks": "H", "slopes": "H", "bias": "1 T H R",
        "k_scale": "1", "v_scale": "1", **PAGES_AXES,
    },
    results={"y": "1 T H E"},
    dtypes={"q": FLOAT, "k_cache": STORED, "v_cache": STORED, "sinks": FLOAT, "bias": FLOAT}
    | dict.fromkeys(("slopes", "k_scale", "v_scale"), (torch.float32,))
    | dict.fromkeys(PAGES_AXES, (torch.int32,)),
    reference=paged_attention,
    tolerances=PRODUCT,
)  # fmt: skip
