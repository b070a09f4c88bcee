"""The attention of RWKV for speed in PyTorch: by doubling, so that a sequence of L tokens takes about log2(L) steps.

After step i each token holds the sums over the last 2^i tokens up to it.
"""

from __future__ import annotations

import torch

from precast.kernels.stateful.forms import forms
from precast.kernels.stateful.walks import Slots, together
from precast.kernels.wkv.step import Sums, added, begun, kept, mean, one


def _scan(k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, first: torch.Tensor, held: Slots) -> torch.Tensor:
    def batch(
        k: torch.Tensor, v: torch.Tensor, is_token: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rate = decay.to(k.dtype)
        start = Sums(*(x[:, None] for x in begun(state)))
        sums = _doubled(start, rate, one(k, v))
        before = Sums(*(torch.cat((old, new[:, :-1]), 1) for old, new in zip(start, sums, strict=True)))
        y = mean(added(before, 0.0, one(k + first.to(k.dtype), v)))
        last = is_token.sum(1, dtype=torch.int64) - 1  # [n, 1]: after a shorter sequence's end is_token is 0
        return y, kept(sums)[torch.arange(len(k), device=k.device), last[:, 0]]

    return together(batch, (k, v, v.new_ones((*v.shape[:2], 1))), v.new_zeros(v.shape), held)


wkv, stateful_wkv = forms("wkv", _scan)


def _doubled(start: Sums, rate: torch.Tensor, each: Sums) -> Sums:
    """The sums up to each token [n, L, C], from those over each by itself, and `start` [n, 1, C] before the first."""
    sums = _joined(added(start, rate, _part(each, 0, 1)), _part(each, 1, None))
    reach, length = 1, each.top.shape[1]
    while reach < length:
        later = added(_part(sums, 0, length - reach), reach * rate, _part(sums, reach, None))
        sums = _joined(_part(sums, 0, reach), later)
        reach *= 2
    return sums


def _part(sums: Sums, begin: int, end: int | None) -> Sums:
    return Sums(*(x[:, begin:end] for x in sums))


def _joined(left: Sums, right: Sums) -> Sums:
    return Sums(*(torch.cat(pair, 1) for pair in zip(left, right, strict=True)))
