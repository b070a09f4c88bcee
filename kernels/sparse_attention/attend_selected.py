"""What the ops of sparse latent attention have in common: the formula for one sequence.

    s[i, h, m] = scale * sum_d q[i, h, d] * k[selected[i, m], h, d]
    p[i, h, m] = exp(s[i, h, m]) / (sum_m exp(s[i, h, m]) + exp(sinks[h]))
    y[i, h] = sum_m p[i, h, m] * v[selected[i, m], h]

Keys and values of each head are made from latents, as in `precast.kernels.latent_attention.expand`. They are not made
here, which would be each selected key's for each query anew: the query is multiplied by the key's part of the weight
instead, and what attention to the latents themselves gives by the value's (`precast.kernels.latent_attention.batched`).

An entry of `selected` that is no position from the first kept key to the query's own is passed over: -1, which stands
where a query selects fewer, and whatever else is there. A query that sees no key gives zeros. An entry that is there
twice counts twice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from precast.kernels.attention.attend import probabilities
from precast.kernels.dtypes import widened
from precast.kernels.latent_attention.expand import Sizes, split
from precast.kernels.sparse_attention.limits import MAX_LATENTS
from precast.kernels.storage import gathered


class Kept(NamedTuple):
    """The latents of a sequence, each with the rope part of its key, [L, C + Dr], and the position of the first."""

    latents: torch.Tensor
    start: int


def attend_selected(
    q: torch.Tensor, kept: Kept, selected: torch.Tensor, queries: torch.Tensor, weight: torch.Tensor,
    sinks: torch.Tensor | None, sizes: Sizes, scale: float,
) -> torch.Tensor:  # fmt: skip
    """One sequence: `q` [Q, H, Dn + Dr] at positions `queries` [Q], `selected` [Q, M], `sinks` [H]; [Q, H, Dv] in
    q's dtype.

    Some queries at a time (`MAX_LATENTS`), since each has latents of its own.
    """
    out = q.new_zeros((*q.shape[:2], sizes.value))
    if len(kept.latents) == 0:
        return out
    wide = widened(q)
    keys, values = split(weight.to(wide.dtype), sizes)
    step = max(MAX_LATENTS // max(selected.shape[1] * kept.latents.shape[1], 1), 1)
    for first in range(0, len(q), step):
        rows = slice(first, first + step)
        places = selected[rows].long() - kept.start
        seen = (places >= 0) & (places <= queries[rows, None] - kept.start) & (places < len(kept.latents))
        latents = gathered(kept.latents, torch.where(seen, places, 0)).to(wide.dtype)
        absorbed = torch.einsum("qhd,hdc->qhc", wide[rows, :, : sizes.nope], keys)
        absorbed = torch.cat((absorbed, wide[rows, :, sizes.nope :]), dim=-1)
        scores = torch.einsum("qhc,qmc->qhm", absorbed, latents) * scale
        shares = probabilities(scores.masked_fill(~seen[:, None], float("-inf")), sinks)
        mixed = torch.einsum("qhm,qmc->qhc", shares, latents[..., : sizes.latent])
        out[rows] = torch.einsum("qhc,hdc->qhd", mixed, values).to(q.dtype)
    return out
