"""paged_select_keys@1: the keys that each of this step's queries selects among those in the pages of a cache, formula
in `precast.kernels.sparse_attention.select`.

A slot of the cache holds the key of a token, which all heads share. Sequences, pages and positions are those of
`precast.kernels.attention.paged`; what is selected are absolute positions. Tokens past `cu_seqlens[B]` are padding, and
select nothing: -1.
"""

from __future__ import annotations

import torch

from precast.kernels.attention.attend import Pages
from precast.kernels.attention.paged import PAGES_AXES, each_sequence
from precast.kernels.calls import implements
from precast.kernels.dtypes import FLOAT
from precast.kernels.sparse_attention.select import select
from precast.kernels.spec import OpSpec
from precast.kernels.storage import STORED, gathered


@implements("paged_select_keys")
def paged_select_keys(
    q: torch.Tensor, cache: torch.Tensor, weights: torch.Tensor, pages: Pages, scale: float, count: int
) -> torch.Tensor:
    """`q` [1, T, H, D], `cache` [P, S, D], `weights` [1, T, H] float32; [1, T, count] int32.

    A cache of another dtype, float8_e4m3fn too, is converted as it is read.
    """
    found = q.new_full((*q.shape[:2], count), -1, dtype=torch.int32)
    for rows, queries, keys, held in each_sequence(pages, q.device):
        # What lies past the last key was never written, or by another sequence: it must not be selected.
        k = gathered(cache, held).flatten(0, 1)[: len(keys)]
        found[0, rows] = select(q[0, rows], weights[0, rows], k, queries, keys[: len(k)], scale, count)
    return found


PAGED_SELECT_KEYS = OpSpec(
    name="precast.paged_select_keys",
    axes={"q": "1 T H D", "cache": "P S D", "weights": "1 T H", **PAGES_AXES},
    results={"selected": "1 T M"},
    dtypes={"q": FLOAT, "cache": STORED, "weights": (torch.float32,)} | dict.fromkeys(PAGES_AXES, (torch.int32,)),
    reference=paged_select_keys,
)
