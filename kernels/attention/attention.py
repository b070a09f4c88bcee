"""attention@1: causal attention over packed sequences, formula in `precast.kernels.attention.attend`.

Tokens `cu_seqlens[b] .. cu_seqlens[b + 1]` are sequence b: its queries and its keys. Tokens past `cu_seqlens[B]` are
padding, and give zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

from precast.kernels.attention.attend import Scoring, attend, check_window
from precast.kernels.calls import implements
from precast.kernels.dtypes import FLOAT
from precast.kernels.spec import PRODUCT, Draw, OpSpec, Sample


@implements("attention")
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """`q` [1, T, H, D], `k` [1, T, K, D], `v` [1, T, K, Dv], `sinks` [H], `cu_seqlens` [B + 1] int32; [1, T, H, Dv].

    `slopes` [H] float32. Computed in float32, rounded once to q's dtype. Raises ValueError for a window or chunk below
    1, and for both at once.
    """
    check_window(scoring.window, scoring.chunk)
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    for first, end in pairwise(cu_seqlens.tolist()):
        positions = torch.arange(end - first, device=q.device)
        rows = slice(first, end)
        out[0, rows] = attend(q[0, rows], k[0, rows], v[0, rows], positions, positions, scoring)
    return out


def _samples(draw: Draw) -> Iterator[Sample]:
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
    yield sample([], 2, 1, 8, 8, 3)
    yield sample([], 2, 1, 8, 8, 0)
    # Query, key and value as slices of the fused product.
    fused = draw.normal(1, 7, 4, 16)
    yield sample([3, 4], 2, 1, 16, 16, 0, q=fused[:, :, :2], k=fused[:, :, 2:3], v=fused[:, :, 3:])


ATTENTION = OpSpec(
    name="precast.attention",
    axes={"q": "1 T H D", "k": "1 T K D", "v": "1 T K E", "sinks": "H", "cu_seqlens": "B+1", "slopes": "H"},
    results={"y": "1 T H E"},
    dtypes=dict.fromkeys(("q", "k", "v", "sinks"), FLOAT) | {"cu_seqlens": (torch.int32,), "slopes": (torch.float32,)},
    reference=attention,
    samples=_samples,
    tolerances=PRODUCT,
)
