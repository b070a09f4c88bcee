"""Noise from a counter: a function of (seed, step, index) alone, the same on every device and in every batch.

The hash works on 32-bit words held in int64: its multipliers are below 2^31, so that no product leaves the type.
"""

from __future__ import annotations

import torch

_WORD = 0xFFFFFFFF
# Largest float32 below 1.
_BELOW_ONE = 1.0 - 2.0**-24


def gumbel(seeds: torch.Tensor, steps: torch.Tensor, size: int, first: int = 0) -> torch.Tensor:
    """Gumbel noise [R, size] float32 of the tokens from `first` on, from `seeds` and `steps` [R] int64; all finite."""
    return gumbel_of(seeds, steps, torch.arange(first, first + size, device=seeds.device))


def gumbel_of(seeds: torch.Tensor, steps: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The same of tokens `index` [N], or [R, N]."""
    uniform = ((words_of(seeds, steps, index).float() + 0.5) * 2.0**-32).clamp_(max=_BELOW_ONE)
    # -log(1 - u) is an exponential variate, and precise where it is small: there the maximum is decided.
    return uniform.neg_().log1p_().neg_().log_().neg_()


def words(seeds: torch.Tensor, steps: torch.Tensor, size: int) -> torch.Tensor:
    """Uniform 32-bit words [R, size], in int64."""
    return words_of(seeds, steps, torch.arange(size, device=seeds.device))


def words_of(seeds: torch.Tensor, steps: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The same of tokens `index` [N], or [R, N]."""
    first, second = _keys(seeds, steps)
    return _mix_(_mix_(index ^ first[:, None]).bitwise_xor_(second[:, None]))


def _keys(seeds: torch.Tensor, steps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two words for each row: two chains over the halves of seed and step, which differ in how a half comes in."""
    first = torch.full_like(seeds, 0x9E3779B9)
    second = torch.full_like(seeds, 0x85EBCA6B)
    for half in (seeds & _WORD, (seeds >> 32) & _WORD, steps & _WORD, (steps >> 32) & _WORD):
        first = _mix_(first ^ half)
        second = _mix_((second + half) & _WORD)
    return first, second


def _mix_(x: torch.Tensor) -> torch.Tensor:
    """A bijection of 32-bit words, in place, of which each bit turns about half of all bits.

    Multipliers and shifts are from Chris Wellons' search for such functions ("hash prospector").
    """
    x ^= x >> 16
    x *= 0x21F0AAAD
    x &= _WORD
    x ^= x >> 15
    x *= 0x735A2D97
    x &= _WORD
    x ^= x >> 15
    return x
