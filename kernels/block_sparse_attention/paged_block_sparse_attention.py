"""paged_block_sparse_attention@1: causal attention of this step's queries over selected blocks of the keys and values
in the pages of a cache, formula in `precast.kernels.block_sparse_attention.attend_blocks`.

Sequences, pages, positions and scales are those of `precast.kernels.attention.paged`; blocks count from position 0,
whatever pages hold them. Tokens past `cu_seqlens[B]` are padding, and give zeros.
"""

from __future__ import annotations

import torch

from precast.kernels.attention.attend import Pages, Scales
from precast.kernels.attention.paged import PAGES_AXES, each_sequence
from precast.kernels.block_sparse_attention.attend_blocks import Blocks, Held, attend_blocks
from precast.kernels.calls import implements
from precast.kernels.dtypes import FLOAT
from precast.kernels.spec import PRODUCT, OpSpec
from precast.kernels.storage import STORED, gathered, unscaled


@implements("paged_block_sparse_attention")
def paged_block_sparse_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    selected: torch.Tensor,
    pages: Pages,
    scale: float,
    blocks: Blocks,
    scales: Scales,
) -> torch.Tensor:
    """`q` [1, T, H, D], `k_cache` [P, S, K, D], `v_cache` [P, S, K, Dv], `selected` [1, T, G, M] int32; [1, T, H, Dv].

    A cache of another dtype, float8_e4m3fn too, is converted as it is read; `scales` are for float8_e4m3fn alone.
    Computed in float32, rounded once to q's dtype.
    """
    out = q.new_zeros((*q.shape[:-1], v_cache.shape[-1]))
    starts = pages.page_start.tolist()
    for start, (rows, queries, keys, held) in zip(starts, each_sequence(pages, q.device), strict=True):
        # What lies past the last key was never written, or by another sequence: it must not enter any product.
        k, v = (
            unscaled(gathered(cache, held).flatten(0, 1)[: len(keys)], by)
            for cache, by in zip((k_cache, v_cache), scales, strict=True)
        )
        out[0, rows] = attend_blocks(q[0, rows], Held(k, v, start), selected[0, rows], queries, scale, blocks)
    return out


PAGED_BLOCK_SPARSE_ATTENTION = OpSpec(
    name="precast.paged_block_sparse_attention",
    axes={
        "q": "1 T H D", "k_cache": "P S K D", "v_cache": "P S K E", "selected": "1 T G M", "k_scale": "1",
        "v_scale": "1", **PAGES_AXES,
    },
    results={"y": "1 T H E"},
    dtypes={"q": FLOAT, "k_cache": STORED, "v_cache": STORED}
    | dict.fromkeys(("k_scale", "v_scale"), (torch.float32,))
    | dict.fromkeys(("selected", *PAGES_AXES), (torch.int32,)),
    reference=paged_block_sparse_attention,
    tolerances=PRODUCT,
)  # fmt: skip
