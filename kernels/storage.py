"""How caches hold values: in the dtype of the activations, in another float dtype, or in 8 bits. What is written is
rounded into new memory, what is read is gathered as it is stored; what computes with it converts it.

Values of 8 bits have no scale: what is stored is the value itself, saturated to the largest finite one, 448 for
float8_e4m3fn. Infinities saturate too; NaN stays NaN.
"""

from __future__ import annotations

import torch

from precast.kernels.dtypes import FLOAT

STORED = (*FLOAT, torch.float8_e4m3fn)
"""The dtypes of cached keys, values and latents."""


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` as a cache of `dtype` holds it, rounded to nearest even; `x` itself where it has that dtype already."""
    if dtype.itemsize == 1 and x.dtype != dtype:
        # By itself, torch's conversion saturates in some releases and gives NaN in others.
        limit = torch.finfo(dtype).max
        x = x.clamp(-limit, limit)
    return x.to(dtype)


def gathered(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """`cache[pages]`, in new memory of the cache's dtype."""
    return bits(cache)[pages].view(cache.dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    """`x` in a type that every release and device can index: 8-bit floats as their bytes."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
