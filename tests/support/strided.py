"""Cache tensors as the loader makes them: pages in one buffer, other memory between them."""

from __future__ import annotations

import math

import torch
from op_samples.draw import Sample

CACHES = ("k_cache", "v_cache", "cache", "state")
"""The arguments of ops that are cache tensors."""
GAP = 24
"""Elements of other memory before, between and behind the parts of a page."""


def with_strided_caches(sample: Sample) -> tuple[Sample, list[torch.Tensor]]:
    """The sample with equal cache tensors whose pages are far apart, and the memory that lies between them, as bytes.

    All bits of that memory are set: no number that is read from it is finite.
    """
    strided, between = dict(sample), []
    for name in CACHES:
        if name in sample:
            strided[name], gaps = _spread(sample[name])
            between += gaps
    return strided, between


def with_distant_caches(sample: Sample) -> Sample:
    """The sample with equal cache tensors whose last page begins 2^31 elements behind the first, or further.

    What lies between pages has all bits set. A cache of two pages or fewer stays as it is: no page is so large.
    """
    return sample | {name: _distant(sample[name]) for name in CACHES if name in sample and len(sample[name]) > 2}


def _distant(cache: torch.Tensor) -> torch.Tensor:
    pages, inner = cache.shape[0], math.prod(cache.shape[1:])
    stride = 16 * math.ceil(2**31 / (pages - 1) / 16)
    memory = torch.full(
        ((pages * stride + inner) * cache.dtype.itemsize,), 0xFF, dtype=torch.uint8, device=cache.device
    )
    far = memory.view(cache.dtype).as_strided(cache.shape, (stride, *cache.stride()[1:]))
    return far.copy_(cache)


def _spread(cache: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    pages, inner = cache.shape[0], math.prod(cache.shape[1:])
    size = cache.dtype.itemsize
    memory = torch.full((pages, (inner + 2 * GAP) * size), 0xFF, dtype=torch.uint8, device=cache.device)
    part = memory.view(cache.dtype)[:, GAP : GAP + inner].view(cache.shape)
    part.copy_(cache)
    assert pages < 2 or not inner or not part.is_contiguous()
    return part, [memory[:, : GAP * size], memory[:, -GAP * size :]]
