"""Rounds values for caches, writes them there and gathers them; caches may hold another float dtype, or 8 bits.

What is written is rounded into new memory, what is read is gathered as it is stored; what computes with it converts it.

Values of 8 bits are saturated to the largest finite one, 448 for float8_e4m3fn. Infinities saturate too; NaN stays NaN.
With a scale s, a float32 number above 0, x is stored as x / s, and what is read, times s, stands for x; without one the
value itself is stored.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from precast.kernels.dtypes import FLOAT

STORED = (*FLOAT, torch.float8_e4m3fn)
"""The dtypes of cached keys, values and latents."""


def rounded(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None = None) -> torch.Tensor:
    """`x`, divided by `scale` [1] float32 in float32, as a cache of `dtype` holds it, rounded to nearest even; `x`
    itself where it has that dtype already."""
    if scale is not None:
        x = x.to(torch.float32) / scale
    if dtype.itemsize == 1 and x.dtype != dtype:
        # By itself, torch's conversion saturates in some releases and gives NaN in others.
        limit = torch.finfo(dtype).max
        x = x.clamp(-limit, limit)
    return x.to(dtype)


def gathered(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """`cache[pages]`, in new memory of the cache's dtype."""
    return bits(cache)[pages].view(cache.dtype)


def unscaled(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """What was read of a cache as it stands for: times `scale` [1] float32, in float32; `x` itself without one."""
    return x if scale is None else x.to(torch.float32) * scale


def bits(x: torch.Tensor) -> torch.Tensor:
    """`x` in a type that every release and device can index: 8-bit floats as their bytes."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


class Places(NamedTuple):
    """Where rows are written: that of token `source[i]` to slot `offset[i]` of page `page[i]`, if `any_token`."""

    source: torch.Tensor
    page: torch.Tensor
    offset: torch.Tensor
    any_token: torch.Tensor


def places_of(slot_mapping: torch.Tensor, page_size: int) -> Places:
    """The places of `slot_mapping` [T], which isn't empty. A padding token, -1, repeats the first other token."""
    kept = slot_mapping >= 0
    tokens = torch.arange(slot_mapping.shape[0], device=slot_mapping.device)
    source = torch.where(kept, tokens, kept.long().argmax())
    slots = slot_mapping[source].clamp(min=0)
    return Places(source, slots // page_size, slots % page_size, kept.any())


def store(rows: torch.Tensor, cache: torch.Tensor, places: Places) -> None:
    """Write `rows` [T, ...] into `cache` [P, S, ...]. If all tokens are padding, slot 0 gets what it holds."""
    held = bits(cache)
    held.index_put_((places.page, places.offset), torch.where(places.any_token, bits(rows), held[0, 0]))
