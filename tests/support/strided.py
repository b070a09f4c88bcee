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


def _spread(cache: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    pages, inner = cache.shape[0], math.prod(cache.shape[1:])
    size = cache.dtype.itemsize
    memory = torch.full((pages, (inner + 2 * GAP) * size), 0xFF, dtype=torch.uint8, device=cache.device)
    part = memory.view(cache.dtype)[:, GAP : GAP + inner].view(cache.shape)
    part.copy_(cache)
    assert pages < 2 or not inner or not part.is_contiguous()
    return part, [memory[:, : GAP * size], memory[:, -GAP * size :]]
